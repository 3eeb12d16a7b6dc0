"""Padded and packed rows: the tokens that they take, and what a model is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lora_problems import tokens_of
from torch import Tensor

from fedllm.problems.lora.packed_rows import PackedRows, find_packed_rows
from fedllm.problems.lora.packing import Packed, PackedFormat
from fedllm.problems.lora.padded_rows import PaddedRows

TOKENS = tokens_of([3, 7, 5, 2, 7])
BATCHES = [np.array([0, 1, 2]), np.array([3])]


class Recorder:
    """Stands for a StackedModel, and records what it is given."""

    def __init__(self, causal: bool = False) -> None:
        self.start, self.causal, self.model = torch.zeros(2), causal, torch.nn.Module()
        self.given: list[Any] = []

    def __call__(
        self, X: Tensor, inputs: dict[str, Tensor], keys: Tensor | None = None, learned: None = None
    ) -> Tensor:
        self.given.append((inputs, keys))
        return torch.zeros(len(inputs["input_ids"]), 1)

    def packed(self, X: Tensor, rows: Packed, keys: Tensor | None = None) -> Tensor:
        self.given.append((rows, keys))
        return torch.zeros(len(rows.reads), 1)


def padded(slices: int | None = None, model: Any = None) -> PaddedRows:
    return PaddedRows(model or Recorder(), TOKENS, pad_id=1, slices=slices)  # type: ignore[arg-type]


def packed(model: Any = None, equal: bool = False) -> PackedRows:
    return PackedRows(model or Recorder(), TOKENS, 1, PackedFormat(False, 0), equal)  # type: ignore[arg-type]


@pytest.mark.parametrize(("slices", "size"), [(None, 3 * 7), (1, 3 * 7), (2, 2 * 7), (3, 7)])
def test_padded_rows_take_the_longest_samples_tokens_each(slices: int | None, size: int) -> None:
    assert padded(slices).sizes(BATCHES) == [size, size]


def test_packed_rows_take_whole_rows() -> None:
    assert packed().sizes(BATCHES) == [3 * 7, 7], "15 tokens in rows of 7, and 2"
    assert packed(equal=True).sizes(BATCHES) == [3 * 7, 3 * 7]


def keys_of(slots: Tensor) -> Tensor:
    return 10 * slots.reshape(-1).int()


def test_a_missing_sample_attends_to_one_token_and_has_a_key() -> None:
    model = Recorder()
    rows = padded(1, model)
    (micro,) = rows.micro_batches(BATCHES)
    rows.outputs(torch.zeros(2, 2), micro, keys_of)
    ((inputs, keys),) = model.given
    assert inputs["attention_mask"].sum(dim=1).tolist() == [3, 5, 7, 1, 1, 2]
    assert inputs["input_ids"].shape == (6, 7)
    assert keys.tolist() == [0, 20, 10, 0, 0, 0], "places in the clients' own batches, the shortest sample first"
    assert torch.equal(inputs["input_ids"][5, :2], TOKENS.rows(torch.tensor([3]))["input_ids"][0].long())


@pytest.mark.parametrize("causal", [False, True])
def test_an_attention_mask_is_given_where_it_is_needed(causal: bool) -> None:
    model = Recorder(causal)
    for index in ([1, 4], [0, 1]):  # two of 7 tokens; one of 3 and one of 7
        padded(model=model).outputs_of(torch.zeros(1, 2), torch.tensor(index))
    assert [("attention_mask" in inputs) for inputs, _ in model.given] == [causal, True]


def test_slices_are_computed_one_after_the_other() -> None:
    rows = padded(3)
    assert [micro.length for micro in rows.micro_batches(BATCHES)] == [3, 5, 7]
    assert len(packed().micro_batches(BATCHES)) == 1


def test_packed_rows_are_given_with_the_keys_of_all_samples() -> None:
    model = Recorder()
    rows = packed(model)
    (micro,) = rows.micro_batches(BATCHES)
    rows.outputs(torch.zeros(2, 2), micro, keys_of)
    ((given, keys),) = model.given
    assert given.sizes == [16, 8], "7 in one row, 3 and 5 in the next row of 8"
    assert keys.tolist() == [0, 10, 20, 0, 10, 20]
    rows.outputs(torch.zeros(2, 2), micro, None)
    assert model.given[-1][1] is None


def test_samples_longer_than_the_models_window_are_not_packed() -> None:
    model: Any = Recorder()
    model.model.config = type("Config", (), {"sliding_window": 6})()
    assert find_packed_rows(padded(model=model), equal=False, flat=False, tolerance=0.1) is None
    assert model.given == []
