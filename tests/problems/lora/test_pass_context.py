"""The pass under way: its dropout counters, and passes inside each other."""

from __future__ import annotations

import pytest
import torch

from fedllm.problems.lora.dropout import Dropout
from fedllm.problems.lora.pass_context import Pass, PassContext

KEYS = torch.tensor([11, 12], dtype=torch.int32)


def test_each_use_of_a_layer_drops_otherwise_and_layers_count_apart() -> None:
    now, x = Pass(dropout=Dropout(KEYS, layers=2)), torch.ones(2, 40)
    first, other, second = now.drop(x, 0.5, 0), now.drop(x, 0.5, 1), now.drop(x, 0.5, 0)
    expected = Dropout(KEYS, layers=2)
    assert torch.equal(first, expected(x, 0.5, 0, 0))
    assert torch.equal(second, expected(x, 0.5, 0, 1))
    assert torch.equal(other, expected(x, 0.5, 1, 0))
    assert now.uses == {0: 2, 1: 1}


def test_a_pass_without_dropout_drops_and_counts_nothing() -> None:
    now, x = Pass(), torch.ones(2, 3)
    assert now.drop(x, 0.5, 0) is x
    assert not now.uses


def test_a_fork_counts_on_its_own() -> None:
    now, x = Pass(dropout=Dropout(KEYS, layers=1)), torch.ones(2, 40)
    now.drop(x, 0.5, 0)
    fork = now.fork()
    assert torch.equal(fork.drop(x, 0.5, 0), now.drop(x, 0.5, 0))
    fork.drop(x, 0.5, 0)
    assert (now.uses, fork.uses) == ({0: 2}, {0: 3})


def test_the_pass_before_comes_back_after_an_error_too() -> None:
    context, outer, inner = PassContext(), Pass(), Pass()
    empty = context.current

    def fail() -> None:
        with context.run(inner):
            assert context.current is inner
            raise ValueError("inside")

    with context.run(outer):
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert context.current is outer
    assert context.current is empty
