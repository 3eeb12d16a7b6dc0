"""How clients are cut into passes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedllm.problems.lora.memory_probe import PassMemory
from fedllm.problems.lora.passes import Passes

MEMORY = PassMemory(fixed=100, token=10)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_passes_hold_all_clients_in_order_and_as_many_as_fit(sizes: list[int], most: int) -> None:
    passes = Passes(MEMORY, most)
    found = list(passes.cut(sizes))
    assert [client for some in found for client in range(len(sizes))[some]] == list(range(len(sizes)))
    for some, after in zip(found, [*found[1:], None], strict=True):
        tokens = sum(sizes[some])
        assert tokens <= most or some.stop - some.start == 1
        if after is not None:
            assert tokens + sizes[after.start] > most, "the next client would have fitted"
    assert passes.largest(sizes) == max(sum(sizes[some]) for some in found)


def test_the_bound_is_in_tokens_of_the_bytes_that_are_saved() -> None:
    assert Passes.within(MEMORY, 250.0).tokens == 25.0
    assert Passes.within(MEMORY, math.inf).tokens == math.inf
    assert list(Passes.within(MEMORY, math.inf).cut([3, 5, 7])) == [slice(0, 3)]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 25), (20, 25), (60, 60), (1000, 100)])
def test_a_pass_may_have_so_many_tokens_within_four_times_the_bytes(tokens: int, expected: int) -> None:
    assert Passes.within(MEMORY, 250.0, tokens).tokens == expected


@pytest.mark.parametrize(("most", "largest"), [(1, 30), (39, 30), (40, 40), (60, 60)])
def test_the_largest_pass(most: int, largest: int) -> None:
    assert Passes(MEMORY, most).largest([10, 30, 20]) == largest
