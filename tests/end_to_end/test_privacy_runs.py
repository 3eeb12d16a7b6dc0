"""The section `privacy:` in whole runs: epsilon in every record, a budget, resumed runs, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from adapters import same_bits

from fedllm import load_recipe, run_recipe
from fedllm.aggregation.accounting import SampledGaussian, full_epsilon
from fedllm.common.errors import UserError
from fedllm.experiment.run import dry_run
from fedllm.reporting.report import report
from fedllm.results.reader import load_run

PRIVATE = [
    "algorithm={name: fedavg, weights: uniform, lr: 1.0e-2}",
    "federation.tracked_per_round=null",
    "local={epochs: null, steps: 2}",
    "uploads.clip=0.5",
]
ALL = [*PRIVATE, "federation.clients_per_round=8"]  # all of N, so that epsilon has its closed form
POISSON = [*PRIVATE, "federation={clients_per_round: 3, sampling: poisson}"]


@pytest.mark.slow
def test_epsilon_is_in_every_evaluated_line_in_the_result_on_the_card_and_on_the_page(
    tiny: Path, tmp_path: Path
) -> None:
    overrides = [*ALL, "privacy={noise: 2.0, delta: 1.0e-2}", "eval.every=2", "federation.rounds=3"]
    done = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    epsilons = [line.get("epsilon") for line in done.metrics]
    assert epsilons == [None, pytest.approx(full_epsilon(2.0, 2, 1e-2)), pytest.approx(full_epsilon(2.0, 3, 1e-2))]
    assert all(line["clipped"].keys() == {"d"} and 0 <= line["clipped"]["d"] <= 1 for line in done.metrics)
    assert all(line["noise_ratio"] > 1 for line in done.metrics)
    told = done.result["privacy"]
    assert told["epsilon"] == epsilons[-1]
    assert (told["delta"], told["noise"], told["sampling"]) == (0.01, 2.0, "fixed")
    assert (told["neighbours"], told["accountant"]) == ("add or remove one client", "closed form")
    assert not told["ended_by_budget"]
    assert any("run.seed" in text for text in told["does_not_cover"])
    card = (done.folder / "adapter" / "README.md").read_text()
    assert f"epsilon {epsilons[-1]:.3g} at delta 0.01" in card
    report([done.folder], tmp_path / "report", ["html"])
    assert "Score over epsilon" in (tmp_path / "report" / "report.html").read_text()
    assert load_run(done.folder).curve("accuracy", "epsilon")[0] == epsilons[1:]


@pytest.mark.slow
def test_sampled_clients_and_a_resumed_run(tiny: Path, tmp_path: Path) -> None:
    """A run cut off after round 2 goes on with the same clients, noise, epsilon and bits."""
    overrides = [*POISSON, "privacy={noise: 2.0, delta: 5.0e-2}", "run.checkpoint_every=2", "eval.every=2"]
    done = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    told = done.result["privacy"]
    assert told["epsilon"] == pytest.approx(SampledGaussian(2.0, 3 / 8).epsilon(4, 0.05), abs=1e-3)
    assert told["accountant"] == "dp-accounting 0.6.0 PLD"
    assert again_after_round_2(done.folder, tiny, overrides, tmp_path / "cut") == told
    assert len({len(line["clients"]) for line in done.metrics}) > 1


def again_after_round_2(folder: Path, tiny: Path, overrides: list[str], cut: Path) -> object:
    """Runs a copy of the folder, without what came after round 2, to the same bits. Returns its entry `privacy`."""
    shutil.copytree(folder, cut)
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "adapter")
    shutil.rmtree(cut / "checkpoints/000004")
    again = run_recipe(tiny / "recipe.yaml", overrides, cut)
    assert same_bits(folder, cut)
    return again.result["privacy"]


@pytest.mark.slow
def test_the_noise_for_an_epsilon_stays_that_of_the_first_round(tiny: Path, tmp_path: Path) -> None:
    """recipe.yaml holds the noise that was found. With more rounds the run keeps it, and epsilon is a budget."""
    overrides = [*ALL, "privacy={epsilon: 6, delta: 5.0e-2}", "run.checkpoint_every=2", "eval.every=2"]
    done = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    told = done.result["privacy"]
    noise = yaml.safe_load((done.folder / "recipe.yaml").read_text())["privacy"]["noise"]
    assert told["epsilon"] == full_epsilon(noise, 4, 0.05)
    assert 0.997 * 6 <= told["epsilon"] <= 6
    assert not told["ended_by_budget"]
    assert again_after_round_2(done.folder, tiny, overrides, tmp_path / "cut") == told
    longer = run_recipe(tiny / "recipe.yaml", [*overrides, "federation.rounds=8"], tmp_path / "cut")
    assert (longer.result["privacy"]["noise"], len(longer.metrics)) == (noise, 4)
    assert longer.result["privacy"]["ended_by_budget"]


def test_a_budget_ends_the_run_before_the_round_beyond_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = full_epsilon(2.0, 2, 1e-2) + 1e-3
    overrides = [*ALL, f"privacy={{noise: 2.0, delta: 1.0e-2, epsilon: {allowed}}}"]
    done = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    said = capsys.readouterr().out
    assert "privacy: the run ends after round 2 of 4: one more would exceed epsilon" in said
    assert len(done.metrics) == 2
    assert done.result["privacy"]["ended_by_budget"]
    assert done.result["ended_by"] == "epsilon"
    assert done.result["privacy"]["epsilon"] <= allowed
    assert done.metrics[-1]["epsilon"] == done.result["privacy"]["epsilon"]
    longer = run_recipe(tiny / "recipe.yaml", [*overrides, "federation.rounds=6"], tmp_path / "run")
    assert "is finished already" in capsys.readouterr().out
    assert longer.result == json.loads((done.folder / "result.json").read_text())
    with pytest.raises(UserError, match=r"privacy.epsilon: found 0.01, but one round with noise=2 takes"):
        dry_run(load_recipe(tiny / "recipe.yaml", [*ALL, "privacy={noise: 2.0, delta: 1.0e-2, epsilon: 0.01}"]))


def test_the_plan_says_what_it_costs_and_warns(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", [*ALL, "privacy={noise: 2.0, delta: 0.2}"]))
    said = " ".join(capsys.readouterr().out.split())
    assert f"of a client: epsilon {full_epsilon(2.0, 4, 0.2):.4g} at delta 0.2 after 4 rounds; noise 2" in said
    assert "all clients in every round" in said
    assert "times its clip 0.5" in said
    assert "privacy.delta=0.2 is not below 1/8" in said


def test_two_numbers_give_the_third_without_an_accountant(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """epsilon and noise give delta; fixed samples of some clients count as if all took part, and say so."""
    fixed = [*PRIVATE, "federation.clients_per_round=3", "privacy={noise: 3.0, epsilon: 4.0}"]
    dry_run(load_recipe(tiny / "recipe.yaml", fixed))
    said = " ".join(capsys.readouterr().out.split())
    delta = SampledGaussian(3.0, 1.0).delta(4, 4.0)
    assert f"epsilon 4 at delta {delta:.3g}" in said
    assert "fixed, 3 of 8: epsilon is as if all took part in every round; federation.sampling=poisson" in said


def test_clipping_without_noise_promises_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", [*ALL, "privacy={noise: 0, delta: 1.0e-2}"]))
    said = " ".join(capsys.readouterr().out.split())
    assert "of a client: no guarantee after 4 rounds" in said
    assert "no noise is added, so nobody is protected" in said


NOISE = "privacy={noise: 1.0, delta: 1.0e-3}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["privacy={noise: 1.0}"], r"privacy: found noise alone, expected two of epsilon, delta and noise"),
        (["privacy={level: client}"], r"privacy: found none of them, expected two of epsilon"),
        (
            ["privacy={noise: 0, epsilon: 1}"],
            r"privacy.noise: found 0 with epsilon=1, but without noise epsilon is inf",
        ),
        (["privacy={noise: -1, delta: 0.1}"], r"privacy.noise: found -1.0, expected zero or more"),
        (["privacy={noise: 1, delta: 1}"], r"privacy.delta: found 1.0, expected a number below 1"),
        (["privacy={noise: 1, delta: 0.1, clip: 2}"], r"privacy.clip: found 2 with level=client, expected none"),
        (
            [NOISE, "uploads.clip=null"],
            r"privacy: FedAvg sends d, and uploads.clip has no norm for d; give one for each",
        ),
        (
            [NOISE, "algorithm=fadamgc", "uploads.clip={d: 1.0}"],
            r"privacy: FAdamGC sends d and y, and uploads.clip has no norm for y",
        ),
        ([NOISE, "algorithm.weights=size"], r"privacy: found algorithm.weights=size, expected uniform"),
        ([NOISE, "local={epochs: 2, steps: null}"], r"privacy: found local.epochs=2, expected local.steps"),
        (
            [NOISE, "algorithm={name: fadamgc, tracking_init: gradient}"],
            r"privacy: found algorithm.tracking_init=gradient, expected zero",
        ),
        ([NOISE, "federation.tracked_per_round=2"], r"privacy: found federation.tracked_per_round=2, expected none"),
        ([NOISE, "federation.min_clients=2"], r"privacy: found federation.min_clients=2, expected 1"),
        (
            ["federation={sampling: poisson, min_clients: 2}"],
            r"federation.min_clients: found 2, expected 1 with federation.sampling=poisson",
        ),
    ],
)
def test_what_the_guarantee_does_not_hold_for_is_refused(tiny: Path, overrides: list[str], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(UserError, match=message):
        load_recipe(tiny / "recipe.yaml", [*PRIVATE, *overrides])
