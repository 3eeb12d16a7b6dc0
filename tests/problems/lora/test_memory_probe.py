"""What a pass saves for its backward: counted on tensors of known sizes, then on a model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lora_problems import LENGTHS, adapted, problem_of
from torch import Tensor, nn

from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.memory_probe import PassMemory, measure, measure_checkpointed, saved_bytes
from fedllm.problems.lora.padded_rows import PaddedRows

FLOAT = 4


def test_saved_tensors_are_counted_once_and_the_models_own_not() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(3, 5)
    assert saved_bytes(lambda: layer(x), layer) == FLOAT * x.numel(), "the input; the weight is the model's"
    assert saved_bytes(lambda: layer(x).exp(), layer) == FLOAT * (x.numel() + 3 * 7), "exp saves its result"
    assert saved_bytes(lambda: layer(x) + layer(x), layer) == FLOAT * x.numel()
    with torch.no_grad():
        assert saved_bytes(lambda: layer(x), layer) == 0


def test_nothing_of_the_probe_stays_in_memory() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(3, 5)
    made: list[weakref.ref[Tensor]] = []

    def forward() -> Tensor:
        result = layer(x).exp()
        made.append(weakref.ref(result))
        return result.sum()

    saved_bytes(forward, layer)
    gc.collect()
    assert made[0]() is None


class Rows:
    """Stands for PaddedRows: a pass that saves `d` numbers, and `each` numbers for every token."""

    def __init__(self, d: int, each: int) -> None:
        self.d, self.each = d, each
        self.lengths = np.array([3, 8, 5])
        self.model = SimpleNamespace(start=torch.zeros(d), model=nn.Module(), checkpoint_blocks=self.checkpoint)

    def checkpoint(self) -> int:
        self.each //= 6
        return 4

    def outputs_of(self, X: Tensor, index: Tensor, keys: Tensor) -> Tensor:
        assert index.tolist() == [1] * len(keys), "copies of the longest sample"
        tokens = torch.zeros(8 * len(index), self.each, requires_grad=True)
        return X.exp().sum() + tokens.exp().sum()


def test_fixed_bytes_and_bytes_per_token() -> None:
    rows: Any = Rows(d=10, each=12)
    assert measure(rows) == PassMemory(fixed=10 * FLOAT, token=12 * FLOAT)


def test_with_checkpointing_a_pass_has_all_inputs_and_the_activations_of_one_block() -> None:
    rows: Any = Rows(d=10, each=12)
    assert measure_checkpointed(rows) == PassMemory(fixed=10 * FLOAT, token=2 * FLOAT + 12 * FLOAT / 4)


def test_the_estimate_holds_for_more_rows_of_a_model(tmp_path: Path) -> None:
    problem = problem_of(adapted(tmp_path, "bert", hidden_dropout_prob=0.1))
    model, longest = problem.model, int(np.argmax(LENGTHS))
    padded = PaddedRows(model, problem.rows.tokens, pad_id=1)

    def saved(copies: int) -> int:
        X, index = problem.initial()[None].requires_grad_(), torch.full((copies,), longest)
        keys = row_keys(0, 0, 0, [0], torch.arange(copies)[None])
        return saved_bytes(lambda: padded.outputs_of(X, index, keys), model.model)

    one, two, four = (saved(copies) for copies in (1, 2, 4))
    assert two > one > 0
    assert four - two == pytest.approx(2 * (two - one), rel=0.02)
    estimate = problem.fixed_bytes + 4 * LENGTHS[longest] * problem.token_bytes
    assert estimate == pytest.approx(four, rel=0.02)
