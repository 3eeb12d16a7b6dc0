"""Samples that clients hold out: repeated ones stay together, and none is trained on elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedllm.common.errors import UserError
from fedllm.config.settings import FederationSettings
from fedllm.data.client_hold_out import draw_held_out, hold_out_own
from fedllm.data.split import Split


def split(texts: list[str]) -> Split:
    return Split([texts], np.zeros(len(texts), np.int64), {})


@given(
    owners=st.lists(st.integers(-1, 3), min_size=4, max_size=40),
    texts=st.lists(st.integers(0, 25), min_size=40, max_size=40),
    fractions=st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]), min_size=4, max_size=4),
)
def test_no_text_is_on_both_sides(owners: list[int], texts: list[int], fractions: list[float]) -> None:
    """Whoever holds it; and a client's samples are all there once. Samples without a client are nobody's."""
    words = [str(text) for text in texts[: len(owners)]]
    parts = [np.flatnonzero(np.array(owners) == client) for client in range(4)]
    kept, held = hold_out_own(split(words), parts, fractions, seed=0)
    for part, trained, out, fraction in zip(parts, kept, held, fractions, strict=True):
        assert sorted([*trained, *out]) == part.tolist()
        assert len(trained) or fraction == 1.0 or not len(part)
        assert not len(out) or fraction > 0
    in_training = {words[row] for own in kept for row in own}
    assert in_training.isdisjoint(words[row] for own in held for row in own)


def test_a_client_holds_out_its_fraction_of_distinct_samples_by_seed_and_client() -> None:
    words = [f"text {row // 2}" for row in range(80)]  # each twice
    parts = [np.arange(40), np.arange(40, 80)]
    kept, held = hold_out_own(split(words), parts, [0.25, 0.25], seed=3)
    assert [len(out) for out in held] == [10, 10]
    assert [len(own) for own in kept] == [30, 30]
    assert (held[0] != held[1] - 40).any(), "another draw for each client"
    again = hold_out_own(split(words), [parts[0], np.arange(40, 60)], [0.25, 0.5], seed=3)[1]
    assert again[0].tolist() == held[0].tolist(), "the draw does not depend on other clients' samples"
    other = hold_out_own(split(words), parts, [0.25, 0.25], seed=4)[1]
    assert other[0].tolist() != held[0].tolist()


def test_a_text_of_two_clients_is_held_out_by_neither() -> None:
    words = ["a", "b", "c", "a ", "d", "d"]  # "a " is "a", as in the hold-out of a validation split
    kept, held = hold_out_own(split(words), [np.arange(3), np.arange(3, 6)], [0.9, 0.9], seed=0)
    assert held[0].tolist() == [1, 2]
    assert kept[0].tolist() == [0]
    assert held[1].tolist() == [4, 5]
    alone = hold_out_own(split(["x", "x", "y"]), [np.array([0, 1]), np.array([2])], [0.5, 0.5], seed=0)
    assert [part.tolist() for part in alone[0]] == [[0, 1], [2]], "one distinct sample is trained on"
    assert [part.tolist() for part in alone[1]] == [[], []]


@pytest.mark.parametrize(("wanted", "found"), [(None, 0), (3, 3), (3.0, 3), (0.2, 2), (0.01, 1), (1, 1)])
def test_the_number_of_clients_that_never_train(wanted: float | None, found: int) -> None:
    assert FederationSettings(held_out=wanted).clients_held_out(10) == found


def test_clients_that_never_train_are_drawn_by_the_seed() -> None:
    drawn = [draw_held_out(20, 5, seed) for seed in range(3)]
    assert drawn[0] == sorted(set(drawn[0]))
    assert all(len(each) == 5 for each in drawn)
    assert drawn[0] != drawn[1]
    assert draw_held_out(20, 5, 0) == drawn[0]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [(10, "held_out: found 10, which is 10 of 10 clients"), (0, "held_out: found 0"), (2.5, "held_out: found 2.5")],
)
def test_a_number_of_clients_that_cannot_be_held_out(wanted: float, said: str) -> None:
    with pytest.raises(UserError, match=said):
        FederationSettings(held_out=wanted).clients_held_out(10)
