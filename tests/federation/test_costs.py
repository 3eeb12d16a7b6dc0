"""What a run says that it cost, against numbers worked out by hand: bytes, V(t), simulated run time, client memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from fedllm import load_algorithm, run_recipe
from fedllm.algorithms import algorithm_names
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment.resume import check_folder
from fedllm.experiment.run import RunResult, dry_run
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


@pytest.mark.slow
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
    assert costed.result["client_vectors"] == {"fedavg": 2, "fadamgc": 5, "fedadamw": 5}[costed.result["algorithm"]]


GC_TABLE_6 = {"fedadam": 2, "fedams": 2, "fedavgm": 3, "scaffoldm": 4, "localadam": 4, "fadamgc": 5}
# x and g; m and v of adaptive clients; then what is received or stored beside the moments: c, G, Delta, ga, y or h.
OTHERS = {
    "fedavg": 2, "fedcm": 3, "scaffold": 3, "padamfed": 4, "localadamw": 4, "fa_nt": 5, "fadamgc_b": 5, "fedadamw": 5,
    "fedlada": 5, "fedprox": 2, "fedyogi": 2, "fedadagrad": 2, "feddyn": 3, "qfedavg": 2, "moon": 3,
}  # fmt: skip


def test_client_vectors_are_those_of_gc_table_6() -> None:
    """The table's scalars over the model's size, and the same count for the other algorithms."""
    found = {name: load_algorithm(name).held_vectors() for name in algorithm_names()}
    assert found == GC_TABLE_6 | OTHERS


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("localadam", {"second_moment": "reset"}, 4),
        ("localadamw", {"aggregate": "vm"}, 4),
        ("fadamgc", {"local": "rmsprop"}, 4),
        ("fa_nt", {"form": "one_vector"}, 5),
    ],
)
def test_client_vectors_of_options(name: str, keys: dict[str, str], expected: int) -> None:
    assert load_algorithm(name, **keys).held_vectors() == expected


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


def test_a_given_time_per_step_takes_the_place_of_the_measured_one(tiny: Path, tmp_path: Path) -> None:
    """One epoch in batches of 8, so the slowest client takes as many steps as the largest of the round has batches.
    Before round 1 the largest of all clients computes as many batches, and moves x0 and a gradient."""
    overrides = ["federation.rounds=2", "algorithm.tracking_init=gradient", "costs={seconds_per_step: 0.5}"]
    run = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    batches = [-(-size // 8) for size in json.loads((run.folder / "partition.json").read_text())["sizes"]]
    transfer = FLOAT * (FADAMGC.down + FADAMGC.up + FADAMGC.tracked) * 8 / 100e6
    for line in run.metrics:
        steps = max(batches[client] for client in line["clients"])
        assert line["simulated_seconds"] == pytest.approx(0.5 * steps + transfer, abs=1e-4)
    start = json.loads((run.folder / "start.json").read_text())
    assert start["simulated_seconds"] == pytest.approx(0.5 * max(batches) + 2 * FLOAT * D * 8 / 100e6, abs=1e-4)
    with pytest.raises(UserError, match=r"costs\.seconds_per_step: 0\.5 there, 0\.2 here"):
        check_folder(run.folder, load_recipe(tiny / "recipe.yaml", [*overrides, "costs={seconds_per_step: 0.2}"]))


def test_a_folder_of_an_earlier_version_measured_its_steps(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml")
    sections = recipe.sections()
    del sections["costs"]["seconds_per_step"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    check_folder(tmp_path, recipe)


EVERYONE = ["federation={rounds: 2, clients_per_round: 8, tracked_per_round: null}"]
STEPS = "local={epochs: null, steps: 2, batch_size: 4}"


@pytest.mark.parametrize(("form", "sent"), [("tracked", 4), ("one_vector", 2)])
@pytest.mark.slow
def test_the_forms_of_fa_nt(tiny: Path, tmp_path: Path, form: str, sent: int) -> None:
    overrides = [*EVERYONE, STEPS, f"algorithm={{name: fa_nt, lr: 0.01, form: {form}}}"]
    run = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / form)
    assert run.result["vectors_per_round"] == {"sent": sent, "derived": 2}
    for line in run.metrics:
        assert line["bytes_down"] + line["bytes_up"] == FLOAT * 8 * sent * D


def test_where_the_one_vector_form_does_not_fit_is_an_error(tiny: Path) -> None:
    chosen = "algorithm={name: fa_nt, form: one_vector}"
    with pytest.raises(UserError, match=r"found one_vector with a client that takes \d local steps.* set local\.steps"):
        dry_run(load_recipe(tiny / "recipe.yaml", [*EVERYONE, chosen]))
    with pytest.raises(UserError, match="clients_per_round: found 5, expected 8, all clients"):
        dry_run(load_recipe(tiny / "recipe.yaml", [STEPS, chosen]))
