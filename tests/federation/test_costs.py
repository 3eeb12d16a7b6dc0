"""What a run says that it cost, against numbers worked out by hand: bytes, V(t), simulated run time, client memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from fedllm import run_recipe
from fedllm.experiment.run import RunResult
from fedllm.federation.costs import simulated_seconds

RANK, HIDDEN, MLP, LABELS, LAYERS, HEADS = 2, 32, 48, 2, 2, 4
ADAPTER = RANK * HIDDEN + HIDDEN * RANK
HEAD = LABELS * HIDDEN + LABELS
D = LAYERS * 2 * ADAPTER + HEAD  # beside query and value: 578
B = LAYERS * ((RANK + HEADS) + (RANK + HIDDEN)) + (LABELS + 1)  # query by head, value by row, the head by class: 83
EMBEDDINGS = (32 + 64 + 2) * HIDDEN + 2 * HIDDEN  # words, positions, types; their norm
ATTENTION = 4 * (HIDDEN * HIDDEN + HIDDEN) + 2 * HIDDEN
FEED_FORWARD = (MLP * HIDDEN + MLP) + (HIDDEN * MLP + HIDDEN) + 2 * HIDDEN
POOLER = HIDDEN * HIDDEN + HIDDEN
FROZEN = EMBEDDINGS + LAYERS * (ATTENTION + FEED_FORWARD) + POOLER + HEAD  # peft keeps the head as it was
S, T, ROUNDS, FLOAT = 5, 3, 2, 4


class Cost(NamedTuple):
    """Numbers, not bytes: down to one client; up from it; up besides from a tracked one; held by it beyond the base."""

    down: int
    up: int
    tracked: int
    held: int


# x down and the update up; x, x as received, and the gradient are held.
FEDAVG = Cost(down=D, up=D, tracked=0, held=3 * D)
# y down too, the change of y up from T; held besides: the correction, the sum of gradients, m, v and vhat of the round,
# y as received, and y_i, v_i, vhat_i from the last time.
FADAMGC = Cost(down=2 * D, up=D, tracked=D, held=3 * D + 5 * D + D + 3 * D)
# Delta and the means of v down, those of the client's v up; held besides: m, v, Delta and the means as received.
FEDADAMW = Cost(down=2 * D + B, up=D + B, tracked=0, held=3 * D + 2 * D + D + B)
COSTS = {"fedavg": FEDAVG, "fadamgc": FADAMGC, "fedadamw": FEDADAMW}


@pytest.fixture(scope="module", params=COSTS)
def costed(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    overrides = [f"federation.rounds={ROUNDS}", f"algorithm={{name: {request.param}, lr: 0.01}}"]
    if request.param != "fadamgc":
        overrides.append(f"federation={{rounds: {ROUNDS}, clients_per_round: {S}, tracked_per_round: null}}")
    return run_recipe(tiny / "recipe.yaml", overrides, tmp_path_factory.mktemp("costs") / request.param)


def cost_of(run: RunResult) -> Cost:
    return COSTS[run.result["algorithm"]]


def test_bytes_both_ways(costed: RunResult) -> None:
    cost = cost_of(costed)
    for line in costed.metrics:
        assert line["bytes_down"] == FLOAT * S * cost.down
        assert line["bytes_up"] == FLOAT * (S * cost.up + T * cost.tracked)
    totals = costed.result["totals"]
    assert totals["bytes_down"] + totals["bytes_up"] == ROUNDS * FLOAT * (S * (cost.down + cost.up) + T * cost.tracked)


def test_vectors_a_round(costed: RunResult) -> None:
    """FedAvg 2, FAdamGC 3 + T/S, FedAdamW 3 + 2 B/d, of which a client that saw x before can work Delta out."""
    expected = {"fedavg": 2, "fadamgc": 3 + T / S, "fedadamw": 3 + 2 * B / D}[costed.result["algorithm"]]
    delta = 1 if costed.result["algorithm"] == "fedadamw" else 0
    vectors = costed.result["vectors_per_round"]
    assert vectors == {"sent": pytest.approx(expected), "derived": pytest.approx(expected - delta)}


def test_client_memory(costed: RunResult) -> None:
    held = cost_of(costed).held
    assert sum(costed.result["client_memory"].values()) == FROZEN + held
    assert costed.result["client_memory_bytes"] == FLOAT * (FROZEN + held)


def test_simulated_run_time(costed: RunResult) -> None:
    """The transfer alone is known by hand; the time to compute is measured, and no more than the round's."""
    cost = cost_of(costed)
    transfer = FLOAT * (cost.down + cost.up + cost.tracked) * 8 / 100e6
    for line in costed.metrics:
        computing = line["simulated_seconds"] - transfer
        assert 0 < computing <= line["seconds"] + 2e-4  # both are rounded to 1e-4 s
    assert simulated_seconds(2.0, 25_000_000, 100) == pytest.approx(4.0)
    totals = costed.result["totals"]
    assert totals["simulated_seconds"] == pytest.approx(sum(line["simulated_seconds"] for line in costed.metrics))
