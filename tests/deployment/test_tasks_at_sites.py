"""Client and Server with a causal language model and with an image classifier: the numbers of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from causal_problems import adapted_causal, causal_problem, plain_loss
from full_models import Pixels, full_problem, gpt2, small_net, tokens
from torch import Tensor, nn

from fedllm import load_algorithm, simulate
from fedllm.client import Broadcast, Client, ParameterSpace, model_blocks, model_info
from fedllm.federation.sampling import sample
from fedllm.server import Server

ROUNDS = 3


@dataclass(frozen=True)
class Work:
    """The problem of a simulation, the model that each site makes, and a site's own loss of some samples."""

    problem: Any
    model: Callable[[], nn.Module]
    loss: Callable[[Any, list[int]], Tensor]


def instructions() -> Work:
    """LoRA on a language model; the mean is over the learned tokens of a batch."""
    problem = causal_problem(adapted_causal("llama"))
    samples = problem.rows.tokens
    return Work(problem, lambda: adapted_causal("llama"), lambda model, some: plain_loss(model, samples, some))


def language() -> Work:
    """All weights of a language model."""
    samples = tokens(learned=True)
    problem = full_problem(gpt2(), samples, clients=3)
    return Work(problem, gpt2, lambda model, some: plain_loss(model, samples, some))


def images() -> Work:
    """All weights of a convolutional net."""
    samples = Pixels.draw(10)

    def net() -> nn.Module:
        return small_net(norm=False)

    def loss(model: nn.Module, some: list[int]) -> Tensor:
        index = torch.tensor(some)
        return F.cross_entropy(model(**samples.rows(index)).logits, samples.targets[index])

    return Work(full_problem(net(), samples, clients=3), net, loss)


WORK = {"instructions": instructions, "language": language, "images": images}


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("instructions", "fadamgc"),
        ("instructions", "fedadamw"),
        ("language", "fedadamw"),
        ("language", "scaffold"),
        ("images", "fadamgc"),
        ("images", "localadamw"),
    ],
)
def test_sites_are_the_simulation(task: str, name: str) -> None:
    """Two of three sites in each round, through bytes, some with more steps than others."""
    # Where a gradient is near 0, m/sqrt(v) is +1 or -1 by its rounding: eps=1e-2 makes the step follow its size.
    settings = {"eps": 1e-2} if name == "fedadamw" else {}
    work, alg = WORK[task](), load_algorithm(name, lr=0.01, **settings)
    problem, batches = work.problem, work.problem.batches
    problem.blocks = model_blocks(alg, work.model())
    steps = max(batches.steps(number) for number in range(3))
    expected = simulate(alg, problem, rounds=ROUNDS, local_steps=steps, clients_per_round=2)

    model = work.model()
    info = model_info(alg, model, rounds=ROUNDS, num_clients=3, sampled=2, local_steps=steps)
    server = Server(alg, ParameterSpace.of(model).gather(model), info)
    sites = [Client(work.model(), alg, info) for _ in range(3)]
    for t in range(ROUNDS):
        for number in sample(0, t, 3, 2, 2)[0]:
            taken = [batches.indices(number, t, k).tolist() for k in range(batches.steps(number))]
            asked = Broadcast.from_bytes(server.broadcast(number).to_bytes())
            sent = sites[number].fit(asked, taken, work.loss)
            assert server.add(sent.to_bytes(), client=number) is None
        x = server.aggregate()
        torch.testing.assert_close(x, expected.history[t + 1], rtol=1e-5, atol=1e-6)
    assert float((x - problem.initial()).abs().max()) > 1e-3
    for key, value in expected.clients.items():
        kept = torch.cat([site.state[key] for site in sites])
        rounding = 5e-6 if name == "scaffold" else 1e-6  # c_i divides x - x_i, rounded to 1e-7, by K eta = 0.02
        torch.testing.assert_close(kept, value, rtol=1e-5, atol=rounding)
