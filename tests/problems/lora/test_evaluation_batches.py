"""Batches of an evaluation, and what happens where they do not fit into memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedllm.common.errors import RunError
from fedllm.problems.lora.evaluation_batches import evaluate, evaluation_batches


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100))
def test_batches_hold_each_sample_once_the_longest_first(lengths: list[int], most: int) -> None:
    batches = evaluation_batches(np.array(lengths), most)
    order = [sample for batch in batches for sample in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[sample] for sample in order] == sorted(lengths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= most for batch in batches)


def outputs_of(index: Tensor) -> Tensor:
    return torch.stack([index.float(), -index.float()], dim=1)


LENGTHS = np.arange(10) + 1


def test_outputs_stand_in_the_rows_of_their_samples() -> None:
    found, cuts = evaluate(outputs_of, LENGTHS, [[7, 3], [9]], cuts=1)
    expected = torch.zeros(10, 2)
    for sample in (3, 7, 9):
        expected[sample] = torch.tensor([sample, -sample])
    assert torch.equal(found, expected)
    assert cuts == 1


@pytest.mark.slow
def test_where_memory_gives_out_the_rest_is_cut_into_more_parts() -> None:
    tried: list[int] = []

    def crowded(index: Tensor) -> Tensor:
        tried.append(len(index))
        if len(index) > 2:
            raise MemoryError
        return outputs_of(index)

    found, cuts = evaluate(crowded, LENGTHS, [list(range(8)), [8, 9]], cuts=1)
    assert torch.equal(found, outputs_of(torch.arange(10)))
    assert cuts == 4
    assert tried == [8, 4, 2, 2, 2, 2, 1, 1]
    tried.clear()
    assert evaluate(crowded, LENGTHS, [list(range(8))], cuts)[1] == 4
    assert tried == [2, 2, 2, 2], "what did not fit once is not tried again"


def test_a_sample_that_does_not_fit_alone_is_named() -> None:
    def full(index: Tensor) -> Tensor:
        raise MemoryError

    with pytest.raises(RunError, match=r"evaluation: a sample of 6 tokens alone does not fit.*data\.max_length"):
        evaluate(full, LENGTHS, [[5]], cuts=1)
