"""Client drift and the spread of second moments, against numbers worked out by hand."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, run_recipe
from fedllm.aggregation.drift import Drift, measures, spread_terms
from fedllm.algorithms import Algorithm, algorithm_names
from fedllm.algorithms.base import Vectors
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.setup import Setup

X = torch.tensor([1.0, 1.0])
# d = (3, 4), (5, 0) and (0, 0): lengths 5, 5 and 0; mean (8/3, 4/3).
MOVED = X + torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 0.0]])
V = torch.tensor([[1.0, 10.0], [3.0, 10.0], [2.0, 40.0]])


def drift(rows: list[int], moved: Tensor = MOVED, v: Tensor = V, name: str = "localadam") -> Drift:
    found = Drift(load_algorithm(name), X)
    found.add(X, {"x": moved, "v": v}, rows)
    return found


def measured(rows: list[int], **given: Any) -> dict[str, float | None]:
    """The measures of a round of one part, whose mean update is the plain mean."""
    one = drift(rows, **given)
    mean = (given.get("moved", MOVED)[rows].double() - X).mean(dim=0)
    spread = None if one.moments is None else spread_terms(one.moments, len(rows))
    return measures(one.counts, mean, one.along(mean), spread)


def test_lengths_and_cosines_of_the_updates() -> None:
    found = measured([0, 1, 2])
    assert found["update_norm"] == pytest.approx(10 / 3)
    assert found["mean_update_norm"] == pytest.approx(math.hypot(8, 4) / 3)
    # cos with (2, 1): (6 + 4)/(5 sqrt 5) and 10/(5 sqrt 5); the client that did not move has none
    assert found["update_cosine"] == pytest.approx(2 / math.sqrt(5))


def test_spread_of_v_is_weighted_by_v() -> None:
    """Two clients: v = 1, 3 (mean 2, deviation 1) and 10, 10 (deviation 0): (1 + 0)/(2 + 10)."""
    assert measured([0, 1])["v_spread"] == pytest.approx(1 / 12)
    both = math.sqrt(2 / 3) + math.sqrt(200)  # v = 1, 3, 2 and 10, 10, 40 (mean 20, squares 100, 100, 400)
    assert measured([0, 1, 2])["v_spread"] == pytest.approx(both / 22)


def test_clients_that_agree() -> None:
    found = measured([0, 0, 0])
    assert found == {
        "update_norm": 5.0, "mean_update_norm": 5.0, "update_cosine": pytest.approx(1), "v_spread": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("rows", [[2], [2, 2]])
def test_what_has_no_meaning_is_none(rows: list[int]) -> None:
    found = measured(rows)
    assert (found["update_norm"], found["update_cosine"]) == (0, None)
    assert (found["v_spread"] is None) == (len(rows) == 1)
    assert measured([0, 1], v=torch.zeros(3, 2))["v_spread"] is None
    assert measured([0, 1], v=torch.full((3, 2), math.inf))["v_spread"] is None


def test_an_algorithm_without_a_second_moment_has_no_spread() -> None:
    assert list(measured([0, 1], name="fedavg")) == ["update_norm", "mean_update_norm", "update_cosine"]


def test_two_halves_add_up_to_the_whole() -> None:
    whole, one, other = drift([0, 1, 2]), drift([0]), drift([1, 2])
    assert {name: one.counts[name] + other.counts[name] for name in whole.counts} == whole.counts
    assert one.moments is not None
    assert other.moments is not None
    assert torch.equal(one.moments + other.moments, whole.moments)
    mean = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert one.along(mean) + other.along(mean) == pytest.approx(whole.along(mean), rel=1e-14)


def test_an_algorithm_that_does_not_send_its_update_has_it_summed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sends(Algorithm):
        def uploads(self) -> Vectors:
            return {"gradient": "d"}

    found = Drift(Sends(), X)
    found.add(X, {"x": MOVED}, [0, 1])
    assert torch.equal(found.updates, (MOVED[:2].double() - X).sum(dim=0))
    assert drift([0]).updates is None


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_reports_its_drift_however_the_round_is_cut(name: str) -> None:
    problem = QuadraticProblem.random(num_clients=6, dim=5, seed=2)
    alg = load_algorithm(name, lr=0.01)
    info = round_info(alg, problem, rounds=3, sampled=5, tracked=3, local_steps=4)
    found = []
    for cohort in (None, 2):
        federation = start(Setup(alg, problem, info))
        for _ in range(2):
            report = run_round(Setup(alg, problem, info), federation, [0, 1, 2, 4, 5], [0, 2, 4], Plan(cohort))
        found.append(report.drift)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert 0 < found[0]["mean_update_norm"] <= found[0]["update_norm"]
    assert -1 <= found[0]["update_cosine"] <= 1
    assert ("v_spread" in found[0]) == ("v" in alg.begin(federation.x[None], federation.server, alg.init_clients(
        federation.x[None], info), info))  # fmt: skip


def test_one_client_alone_drifts_from_nobody() -> None:
    problem = QuadraticProblem.random(num_clients=2, dim=5)
    alg = load_algorithm("localadam", lr=0.01)
    info = round_info(alg, problem, rounds=1, sampled=1, tracked=None, local_steps=3)
    found = run_round(Setup(alg, problem, info), start(Setup(alg, problem, info)), [1], [1]).drift
    assert found["update_norm"] == found["mean_update_norm"]
    assert found["update_cosine"] == pytest.approx(1)
    assert found["v_spread"] is None


def test_a_runs_lines_carry_it(tiny: Path, tmp_path: Path) -> None:
    result = run_recipe(tiny / "recipe.yaml", ["federation.rounds=1", "run.threads=1"], tmp_path / "run")
    (line,) = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    assert 0 < line["mean_update_norm"] < line["update_norm"]
    assert 0 < line["update_cosine"] < 1
    assert line["v_spread"] > 0
