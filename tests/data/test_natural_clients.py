"""Clients of a column's values, with limits, and what the limits leave out."""

import numpy as np
import pytest

from fedllm.common.errors import UserError
from fedllm.data.natural_clients import left_out, natural_clients

COLUMN = ["b"] * 6 + ["a"] * 3 + ["c"] + ["d"] * 4  # the clients a, b, c, d have 3, 6, 1 and 4 samples


def sizes(parts):
    return [len(part) for part in parts]


def clients(**limits):
    return natural_clients(COLUMN, len(COLUMN), None, **limits)


def test_without_limits_every_sample_has_its_client():
    parts = clients()
    assert [part.tolist() for part in parts] == [[6, 7, 8], [0, 1, 2, 3, 4, 5], [9], [10, 11, 12, 13]]
    assert left_out(COLUMN, parts) == []


def test_max_size_keeps_random_samples_of_the_large_clients_alone():
    parts = clients(max_size=3)
    assert sizes(parts) == [3, 3, 1, 3]
    assert all(COLUMN[sample] == name for name, part in zip("abcd", parts, strict=True) for sample in part)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert [part.tolist() for part in clients(max_size=3)] == [part.tolist() for part in parts]
    assert len({tuple(clients(max_size=3, seed=seed)[1]) for seed in range(8)}) > 1
    assert left_out(COLUMN, parts) == [
        "partition.max_size leaves out 4 of 14 samples, of 2 of 4 clients: 'b' (3), 'd' (1)"
    ]


def test_a_dropped_client_does_not_change_the_samples_of_the_others():
    kept = clients(max_size=3, min_size=2, drop_small=True)
    assert [part.tolist() for part in kept] == [part.tolist() for part in clients(max_size=3) if len(part) > 1]


def test_small_clients_are_left_out_and_counted():
    parts = clients(min_size=4, drop_small=True)
    assert sizes(parts) == [6, 4]
    assert left_out(COLUMN, parts) == [
        "partition.drop_small leaves out 2 of 4 clients, which have 4 samples: 'a' (3), 'c' (1)"
    ]
    assert sizes(natural_clients(COLUMN, 14, 2, min_size=4, drop_small=True)) == [6, 4]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"min_size": 4}, r"partition.min_size=4: fewer samples for 'a' \(3\), 'c' \(1\); .*partition.drop_small"),
        ({"min_size": 7, "drop_small": True}, r"partition.min_size=7: every client has fewer samples"),
        ({"max_size": 0}, "partition.max_size=0: expected at least min_size=1"),
        ({"max_size": 2, "min_size": 3, "drop_small": True}, "partition.max_size=2: expected at least min_size=3"),
        (
            {"clients": 4, "min_size": 2, "drop_small": True},
            "has 3 distinct values with 2 samples or more, .*null or 3",
        ),
    ],
)
def test_limits_that_do_not_fit_are_named(limits, said):
    count = limits.pop("clients", None)
    with pytest.raises(UserError, match=said):
        natural_clients(COLUMN, len(COLUMN), count, **limits)
