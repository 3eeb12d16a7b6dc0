"""The parts put together: whose loss it is, how rows are chosen, and how an evaluation is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_problems import adapted, cross_entropy, problem_of, tokens_of
from torch import Tensor

from fedllm.problems.lora.problem import LoraProblem


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> LoraProblem:
    return problem_of(adapted(tmp_path_factory.mktemp("bert"), "bert", rate=0.0))


def rows_of(problem: LoraProblem) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return problem.initial() + 0.1 * torch.randn(3, problem.dim, generator=draw)


def test_the_loss_is_the_one_that_was_given(tmp_path: Path, problem: LoraProblem) -> None:
    """Four times a task's losses are four times its losses and gradients, bit for bit."""

    def four_times(outputs: Tensor, targets: Tensor) -> Tensor:
        assert outputs.dtype == torch.float32
        assert (outputs.shape[1], targets.shape) == (3, outputs.shape[:1])
        return 4 * cross_entropy(outputs, targets)

    other = problem_of(adapted(tmp_path, "bert", rate=0.0), losses=four_times)
    losses, gradients = problem.loss_and_gradient(rows_of(problem), [0, 1, 2], 0, 0)
    more, steeper = other.loss_and_gradient(rows_of(other), [0, 1, 2], 0, 0)
    assert torch.equal(more, 4 * losses)
    assert torch.equal(steeper, 4 * gradients)


def test_rows_are_chosen_and_chosen_again(problem: LoraProblem) -> None:
    X, packed = rows_of(problem), problem.rows
    assert problem.packed
    found = [problem.gradient(X, [0, 1, 2], 0, 0)]
    for slices in (1, 2):
        problem.choose_rows(slices)
        assert not problem.packed
        found.append(problem.gradient(X, [0, 1, 2], 0, 0))
    problem.choose_rows(None)
    assert problem.rows is packed
    assert torch.equal(problem.gradient(X, [0, 1, 2], 0, 0), found[0])
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-4, atol=1e-6)


def test_the_parts_of_an_evaluation_add_up_to_the_whole(problem: LoraProblem) -> None:
    x, tokens, before = problem.initial() + 0.05, tokens_of([3, 9, 5, 2, 7, 4]), problem.pass_tokens
    whole = problem.outputs(x, tokens)
    assert whole.shape == (6, 3)
    problem.passes.tokens = 12  # five batches: 9, 7, 5 + 4 as two of 5, 3 + 2 as two of 3
    parts = [problem.outputs(x, tokens, part, 3) for part in range(3)]
    problem.passes.tokens = before
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-5)
    assert [int(part.any(dim=1).sum()) for part in parts] == [3, 1, 2]
    assert not problem.outputs(x, tokens, part=1, parts=2).any(), "one batch, which is the first process's"


def test_sizes_and_the_largest_pass(problem: LoraProblem) -> None:
    """Clients of 4 + 4 + 4 + 4, 30 + 4 + 5 + 4 and 25 + 28 + 22 + 4 tokens in packed rows of 30."""
    assert problem.sizes([2, 0]).tolist() == [4.0, 4.0]
    assert problem.steps([0, 1], 0).tolist() == [1, 1]
    assert problem.largest_pass([0, 1, 2], steps=1) == (1 + 2 + 3) * 30
    assert problem.largest_pass([0], steps=1) == 4 * 4
    assert problem.largest_pass([0], steps=0) == 0
