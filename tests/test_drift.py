"""Client drift and the spread of second moments, against numbers worked out by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, run_recipe
from fedllm.algorithms import algorithm_names
from fedllm.drift import Drift
from fedllm.rounds import Plan, round_info, run_round, start

X = torch.tensor([1.0, 1.0])
# d = (3, 4), (5, 0) and (0, 0): lengths 5, 5 and 0; mean (8/3, 4/3).
MOVED = X + torch.tensor([[3.0, 4.0], [5.0, 0.0], [0.0, 0.0]])
V = torch.tensor([[1.0, 10.0], [3.0, 10.0], [2.0, 40.0]])


def drift(rows: list[int], moved: Tensor = MOVED, v: Tensor = V, name: str = "localadam") -> Drift:
    found = Drift(load_algorithm(name), X)
    found.add(X, {"x": moved, "v": v}, rows)
    return found


def test_lengths_and_cosines_of_the_updates() -> None:
    measures = drift([0, 1, 2]).measures()
    assert measures["update_norm"] == pytest.approx(10 / 3)
    assert measures["mean_update_norm"] == pytest.approx(math.hypot(8, 4) / 3)
    # cos with (2, 1): (6 + 4)/(5 sqrt 5) and 10/(5 sqrt 5); the client that did not move has none
    assert measures["update_cosine"] == pytest.approx(2 / math.sqrt(5))


def test_spread_of_v_is_weighted_by_v() -> None:
    """Two clients: v = 1, 3 (mean 2, deviation 1) and 10, 10 (deviation 0): (1 + 0)/(2 + 10)."""
    assert drift([0, 1]).measures()["v_spread"] == pytest.approx(1 / 12)
    both = math.sqrt(2 / 3) + math.sqrt(200)  # v = 1, 3, 2 and 10, 10, 40 (mean 20, squares 100, 100, 400)
    assert drift([0, 1, 2]).measures()["v_spread"] == pytest.approx(both / 22)


def test_clients_that_agree() -> None:
    measures = drift([0, 0, 0]).measures()
    assert measures == {
        "update_norm": 5.0, "mean_update_norm": 5.0, "update_cosine": pytest.approx(1), "v_spread": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("rows", [[2], [2, 2]])
def test_what_has_no_meaning_is_none(rows: list[int]) -> None:
    measures = drift(rows).measures()
    assert (measures["update_norm"], measures["update_cosine"]) == (0, None)
    assert (measures["v_spread"] is None) == (len(rows) == 1)
    assert drift([0, 1], v=torch.zeros(3, 2)).measures()["v_spread"] is None
    assert drift([0, 1], v=torch.full((3, 2), math.inf)).measures()["v_spread"] is None


def test_an_algorithm_without_a_second_moment_has_no_spread() -> None:
    assert list(drift([0, 1], name="fedavg").measures()) == ["update_norm", "mean_update_norm", "update_cosine"]


def test_sums_of_two_halves_are_the_sums_of_the_whole() -> None:
    whole, one, other = drift([0, 1, 2]), drift([0]), drift([1, 2])
    for name, total in one.sums.items():
        total += other.sums[name]
        assert torch.equal(total, whole.sums[name]), name


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_reports_its_drift_however_the_round_is_cut(name: str) -> None:
    problem = QuadraticProblem.random(num_clients=6, dim=5, seed=2)
    alg = load_algorithm(name, lr=0.01)
    info = round_info(alg, problem, rounds=3, sampled=5, tracked=3, local_steps=4)
    found = []
    for cohort in (None, 2):
        federation = start(alg, problem, info)
        for _ in range(2):
            report = run_round(alg, problem, federation, info, [0, 1, 2, 4, 5], [0, 2, 4], Plan(cohort))
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
    measures = run_round(alg, problem, start(alg, problem, info), info, [1], [1]).drift
    assert measures["update_norm"] == measures["mean_update_norm"]
    assert measures["update_cosine"] == pytest.approx(1)
    assert measures["v_spread"] is None


def test_a_runs_lines_carry_it(tiny: Path, tmp_path: Path) -> None:
    result = run_recipe(tiny / "recipe.yaml", ["federation.rounds=1", "run.threads=1"], tmp_path / "run")
    (line,) = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    assert 0 < line["mean_update_norm"] < line["update_norm"]
    assert 0 < line["update_cosine"] < 1
    assert line["v_spread"] > 0
