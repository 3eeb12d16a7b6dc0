"""Gradients of single samples: those of the plain model, sample by sample, however they are cut into passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from causal_problems import adapted_causal, causal_problem, causal_tokens, plain_loss
from full_models import Pixels, bert, full_problem, gpt2, small_net, tokens
from lora_problems import LENGTHS, adapted, problem_of, tokens_of
from private_clients import private
from torch import Tensor

from fedllm.data.poisson_batches import PoissonBatches
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.base import Problem
from fedllm.problems.private import clipped_sums
from fedllm.problems.sample_rows import SampleRows, row_bytes

CLIP = 0.05


def points(problem: Problem, clients: int) -> Tensor:
    """Other parameters for each client."""
    noise = torch.randn(clients, problem.dim, generator=torch.Generator().manual_seed(3))
    return problem.initial() + 0.05 * noise


def plain_sum(model: Any, space: ParameterSpace, x: Tensor, samples: np.ndarray, loss_of: Any, clip: float) -> Tensor:
    """The clipped gradients [d] of the samples by torch.autograd, one after the other."""
    space.scatter(model, x)
    total = torch.zeros(space.dim)
    for sample in samples:
        model.zero_grad()
        loss_of(model, int(sample)).backward()
        # A parameter that the model does not use has no gradient.
        g = torch.cat([torch.zeros(v.numel()) if v.grad is None else v.grad.reshape(-1) for v in _trained(model)])
        total += g * min(1.0, clip / float(g.double().norm()))
    return total


def _trained(model: Any) -> list[Tensor]:
    return [value for value in model.parameters() if value.requires_grad]


def _classified(samples: Any) -> Any:
    def loss(model: Any, sample: int) -> Tensor:
        rows = samples.rows(torch.tensor([sample]))
        return F.cross_entropy(model(**rows).logits, samples.targets[sample][None])

    return loss


def _causal(samples: Any) -> Any:
    return lambda model, sample: plain_loss(model, samples, [sample])


def check(problem: Any, model: Any, loss_of: Any, clip: float = CLIP) -> None:
    """Private gradients without noise, and the sums of three clients, against plain_sum."""
    parts = problem.batches.parts
    X, clients = points(problem, len(parts)), range(len(parts))
    batches = PoissonBatches(parts, 3, 0)
    found = private(problem, parts, clip=clip).gradient(X, clients, 1, 2)
    for client in clients:
        taken = batches.indices(client, 1, 2)
        expected = plain_sum(model, problem.space, X[client], taken, loss_of, clip) / batches.expected(client)
        assert float((found[client] - expected).norm()) <= 1e-6 * max(1.0, float(expected.norm()))
        assert len(taken) == 0 or float(expected.norm()) > 1e-3


def test_lora_of_an_encoder(tmp_path: Path) -> None:
    problem, model = problem_of(adapted(tmp_path, "bert", rate=0.0)), adapted(tmp_path, "bert", rate=0.0)
    check(problem, model, _classified(tokens_of(LENGTHS)))
    check(problem, model, _classified(tokens_of(LENGTHS)), clip=100.0)


@pytest.mark.parametrize("settings", [{"pass_bytes": 1.0}, {"pass_bytes": 3e5}, {"slices": 2}], ids=str)
def test_passes_and_slices_change_nothing_but_rounding(tmp_path: Path, settings: dict[str, Any]) -> None:
    problem = problem_of(adapted(tmp_path, "bert", rate=0.0), **settings)
    check(problem, adapted(tmp_path, "bert", rate=0.0), _classified(tokens_of(LENGTHS)))


def test_lora_of_a_language_model_is_the_mean_over_each_samples_learned_tokens() -> None:
    check(causal_problem(adapted_causal("llama")), adapted_causal("llama"), _causal(causal_tokens()))


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize(
    ("make", "samples", "loss_of"),
    [
        (bert, tokens(), _classified),
        (gpt2, tokens(learned=True), _causal),
        (lambda: small_net(norm=False), Pixels.draw(10), _classified),
    ],
    ids=["bert", "gpt2", "net"],
)
def test_all_weights(make: Any, samples: Any, loss_of: Any, stacked: bool) -> None:
    problem = full_problem(make(), samples, stacked=stacked)
    check(problem, make(), loss_of(samples))


def test_dropout_is_that_of_client_step_and_place_in_the_batch(tmp_path: Path) -> None:
    """Also of samples that are trained with others, and each sample has its own."""
    lora = problem_of(adapted(tmp_path, "bert", rate=0.3))
    full = full_problem(bert(0.3), tokens())
    light = full_problem(small_net(norm=False), Pixels(Pixels.draw(10).values, augment=True))
    for problem in (lora, full, light):
        parts = problem.batches.parts
        X = problem.initial().repeat(2, 1)
        twice = [np.array([parts[0][0]] * 4), parts[1][:3]]
        (rows, gradients) = _all(problem, X, twice, [0, 1])
        first, *others = gradients[rows == 0]
        assert any(not torch.allclose(first, other, rtol=1e-3) for other in others)
        alone_rows, alone = _all(problem, X[:1], twice[1:], [1])
        assert torch.allclose(alone, gradients[rows == 1], atol=1e-6)
        assert len(alone_rows) == 3
        _, again = _all(problem, X, twice, [0, 1])
        assert torch.equal(again, gradients)
        _, other = _all(problem, X[:1], twice[1:], [1], step=1)
        assert not torch.allclose(other, alone, atol=1e-6)


def _all(problem: Problem, X: Tensor, samples: Any, clients: list[int], step: int = 0) -> tuple[np.ndarray, Tensor]:
    parts = list(problem.sample_gradients(X, samples, clients, 0, step))
    return np.concatenate([each.rows for each in parts]), torch.cat([each.gradients for each in parts])


def test_no_samples_at_all_give_zeros(tmp_path: Path) -> None:
    for problem in (problem_of(adapted(tmp_path, "bert", rate=0.0)), full_problem(bert(), tokens())):
        X, nothing = problem.initial().repeat(2, 1), [np.empty(0, np.int64)] * 2
        _, sums = clipped_sums(X, problem.sample_gradients(X, nothing, [0, 1], 0, 0), 1.0)
        assert not sums.any()


def test_a_pass_stays_within_its_bytes_and_is_counted_before_training(tmp_path: Path) -> None:
    problem = problem_of(adapted(tmp_path, "bert", rate=0.0), pass_bytes=3e5)
    lengths, passes, dim = problem.rows.lengths, problem.passes, problem.dim
    every = SampleRows.of(problem.batches.parts, [0, 1, 2], lengths)
    cut = list(every.passes(lengths, passes, dim))
    assert sorted(np.concatenate([some.samples for some in cut])) == list(range(len(LENGTHS)))
    sizes = [len(some.samples) * row_bytes(int(lengths[some.samples].max()), passes, dim) for some in cut]
    assert 1 < len(cut) < len(LENGTHS)
    assert all(size <= 3e5 or len(some.samples) == 1 for size, some in zip(sizes, cut, strict=True))
    assert problem.largest_sample_pass([0, 1, 2], 1) * problem.token_bytes >= max(sizes)
    assert max(sizes) > 12 * dim
