"""What each file of a run folder must hold."""

from __future__ import annotations

from typing import Any

import pytest

from fedllm.results.run_files import Clients, Costs, DamagedError, Result, RoundLine, checked

COSTS: dict[str, Any] = {"bytes_up": 1, "bytes_down": 2, "seconds": 0.5, "simulated_seconds": 0}
LINE = {**COSTS, "round": 1, "train_loss": None, "clients": [3], "rejected": {"3": "not finite"}, "accuracy": 0.5}
RESULT = {
    "status": "finished", "algorithm": "fedavg", "seed": 0, "primary": "accuracy", "final": {"accuracy": None},
    "best": {"accuracy": {"value": 1, "round": 2}}, "target": None, "rounds": 2, "rounds_to_target": None,
    "rejected": 0, "totals": COSTS,
}  # fmt: skip
CLIENTS = {"sizes": [2, 1], "classes": [], "counts": None}


@pytest.mark.parametrize(
    ("kind", "whole"),
    [(Costs, COSTS), (RoundLine, LINE), (Result, RESULT), (Clients, CLIENTS), (Result, RESULT | {"more": [1]})],
)
def test_what_a_run_leaves_is_taken_as_it_is(kind: type, whole: dict) -> None:
    assert checked(whole, kind, "file") is whole


@pytest.mark.parametrize(
    ("kind", "whole", "key", "value", "expected"),
    [
        (Costs, COSTS, "seconds", -0.1, "a number of 0 or more"),
        (Costs, COSTS, "seconds", True, "a number of 0 or more"),
        (Costs, COSTS, "seconds", "1", "a number of 0 or more"),
        (Costs, COSTS, "bytes_up", float("inf"), "a number of 0 or more"),
        (RoundLine, LINE, "round", 1.0, "a whole number"),
        (RoundLine, LINE, "round", True, "a whole number"),
        (RoundLine, LINE, "accuracy", float("nan"), "a number or null"),
        (RoundLine, LINE, "accuracy", 10**400, "a number or null"),
        (RoundLine, LINE, "a_new_score", [1], "a number or null"),
        (RoundLine, LINE, "rejected", [], "a reason for each client"),
        (Result, RESULT, "status", "unfinished", "'finished'"),
        (Result, RESULT, "algorithm", None, "a word"),
        (Result, RESULT, "final", {"accuracy": "high"}, "a number for each metric"),
        (Result, RESULT, "best", {"accuracy": {"value": 1}}, "a value and a round for each metric"),
        (Result, RESULT, "target", {"accuracy": None}, "null or a number for each metric"),
        (Result, RESULT, "rounds_to_target", 1.5, "a whole number or null"),
        (Result, RESULT, "totals", {"bytes_up": 1}, "numbers bytes_up, bytes_down, seconds, simulated_seconds"),
        (Clients, CLIENTS, "sizes", [], "a list of whole numbers"),
        (Clients, CLIENTS, "sizes", [2, -1], "a list of whole numbers"),
        (Clients, CLIENTS, "sizes", [2**53], "a list of whole numbers"),
        (Clients, CLIENTS, "classes", [1], "a list of words"),
        (Clients, CLIENTS, "counts", [[1.0]], "null or a list of whole numbers for each client"),
    ],
)
def test_another_value_is_named_with_what_was_expected(
    kind: type, whole: dict, key: str, value: object, expected: str
) -> None:
    with pytest.raises(DamagedError) as error:
        checked({**whole, key: value}, kind, "file")
    start = f"file: {key} is {repr(value)[:60]}"
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(f", expected {expected}; damaged")


def test_missing_keys_are_all_named_and_what_is_no_object() -> None:
    with pytest.raises(DamagedError, match=r"^file lacks bytes_up, seconds; no run$"):
        checked({"bytes_down": 2, "simulated_seconds": 0}, Costs, "file", "no run")
    with pytest.raises(DamagedError, match=r"^file is list, expected an object; damaged$"):
        checked([], Costs, "file")
    with pytest.raises(DamagedError, match=r"^file has a key that is no text; damaged$"):
        checked({**LINE, "\ud800": 1}, RoundLine, "file")
