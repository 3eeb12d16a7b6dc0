"""Rounds of language models: every algorithm, clients together and alone, and plain loops over PEFT models."""

from __future__ import annotations

import pytest
import torch
from causal_problems import adapted_causal, causal_problem, causal_tokens, plain_loss

from fedllm import load_algorithm, simulate
from fedllm.algorithms import algorithm_names
from fedllm.common.errors import UserError
from fedllm.problems.lora.problem import LoraProblem

TOKENS = causal_tokens([5 + 7 * number % 24 for number in range(40)], [1 + number % 4 for number in range(40)])


def ten_clients(dropout: float) -> LoraProblem:
    """Of four samples each, in batches of three and one."""
    return causal_problem(adapted_causal("llama", dropout), TOKENS, batch_size=3, clients=10)


@pytest.mark.parametrize("name", [name for name in algorithm_names() if name != "moon"])
def test_clients_together_end_as_one_by_one(name: str) -> None:
    """Ten clients, four rounds, dropout on, every algorithm.

    tau is large where the server divides by sqrt(v) + tau, which makes the rounding of a value near 0 a whole step.
    """
    alg = load_algorithm(name, **({"tau": 1.0} if name in ("fedadam", "fedadagrad", "fedyogi") else {}))
    ends = [
        simulate(alg, ten_clients(0.2), rounds=4, local_steps=2, stacked_clients=together, progress=False).x
        for together in (10, 3, 1)
    ]
    start = ten_clients(0.2).initial()
    assert float((ends[0] - start).abs().max()) > 0
    for end in ends[1:]:
        assert float((end - ends[0]).abs().max()) < 1e-5 * float(ends[0].abs().max())


def test_moon_is_refused_by_name() -> None:
    """It compares representations of texts, which a language model does not have."""
    with pytest.raises(UserError, match="MOON: found a causal language model"):
        simulate(load_algorithm("moon"), ten_clients(0.0), rounds=1, local_steps=1)


@pytest.mark.parametrize("name", ["fedavg", "localadamw"])
def test_rounds_are_plain_peft_loops(name: str) -> None:
    """Each client trains the same plain model with torch's optimizer, and the server takes the mean."""
    problem = ten_clients(0.0)
    more = {"eps": 1e-3} if name == "localadamw" else {}
    alg = load_algorithm(name, lr=0.01, weight_decay=0.01, weights="uniform", **more)
    found = simulate(alg, problem, rounds=4, local_steps=2, progress=False).x
    model = adapted_causal("llama")
    x = problem.initial()
    for t in range(4):
        ends = []
        for client in range(10):
            problem.space.scatter(model, x)
            trained = [value for value in model.parameters() if value.requires_grad]
            kind = torch.optim.SGD if name == "fedavg" else torch.optim.AdamW
            optimizer = kind(trained, lr=0.01, weight_decay=0.01, **more)
            for k in range(2):
                optimizer.zero_grad()
                plain_loss(model, TOKENS, problem.batches.indices(client, t, k).tolist()).backward()
                optimizer.step()
            ends.append(problem.space.gather(model))
        x = torch.stack(ends).mean(dim=0)
    assert float((found - x).abs().max()) < 1e-5 * float(x.abs().max())
