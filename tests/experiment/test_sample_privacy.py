"""Runs with sample-level privacy: what they spend and say, the same bits however they are cut, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapters import assert_close, same_bits
from conftest import write_rows
from federations import ThreadLink, deployed, settings, simulated, split_rows, written
from full_models import Pixels, full_problem, small_net
from jobs import job
from launched import launch, numbers

from fedllm import load_recipe, run_recipe
from fedllm.aggregation.accounting import SampledGaussian
from fedllm.common.errors import RunError, UserError
from fedllm.experiment import training
from fedllm.experiment.run import RunResult
from fedllm.experiment.sample_privacy import epsilon_of_site, steps_after
from fedllm.problems.lora.problem import LoraProblem
from fedllm.results.reader import load_run

pytest.importorskip("dp_accounting")
PRIVATE = ["privacy={level: sample, noise: 4.0, delta: 1.0e-3, clip: 0.3}", "local={steps: 2, batch_size: 4}"]
FEW = ["federation.rounds=3", "eval.every=2", "run.trackers=[]"]


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW], tmp_path_factory.mktemp("private") / "run")


@pytest.mark.slow
def test_epsilon_is_that_of_the_steps_really_taken(tiny: Path, finished: RunResult) -> None:
    """Each client's rounds are counted in metrics.jsonl, and its epsilon is dp-accounting's."""
    sizes = json.loads((finished.folder / "partition.json").read_text())["sizes"]
    told = finished.result["privacy"]
    for rounds, found in ((2, finished.metrics[1]), (3, told)):
        taken = [0] * len(sizes)
        for line in finished.metrics[:rounds]:
            for client in line["clients"]:
                taken[client] += 2
        each = [
            SampledGaussian(4.0, min(1.0, 4 / n)).epsilon(times, 1e-3) for n, times in zip(sizes, taken, strict=True)
        ]
        assert found["epsilon"] == pytest.approx(max(each), rel=1e-3)
        assert found["epsilon_median"] == pytest.approx(sorted(each)[len(each) // 2], rel=1e-3)
    assert "epsilon" not in finished.metrics[0]
    assert told["level"] == "sample"
    assert told["neighbours"] == "add or remove one sample of one client"
    assert "train_loss" in " ".join(told["does_not_cover"])
    load_run(finished.folder)


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tiny: Path, tmp_path: Path) -> None:
    """Batches, noise and epsilon depend on the client, wherever it is trained."""
    one = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW, "run.shares=2"], tmp_path / "one").folder
    done = launch("scripts/fedtune.py", str(tiny / "recipe.yaml"), *PRIVATE, *FEW, f"run.dir={tmp_path / 'two'}")
    assert done.returncode == 0, done.stderr
    assert same_bits(tmp_path / "two", one)
    assert numbers(tmp_path / "two") == numbers(one)


@pytest.mark.slow
def test_the_plan_tells_epsilon_batches_and_noise(tiny: Path, finished: RunResult) -> None:
    from rich.console import Console

    from fedllm.experiment.plan import plan_table

    console = Console(width=500, record=True, file=io.StringIO())
    console.print(plan_table(job(tiny, *PRIVATE, *FEW)))
    text = console.export_text()
    assert f"epsilon {finished.result['privacy']['epsilon']:.4g} of the client with the most" in text
    assert "Poisson: in each step each sample by itself with probability 4 / n" in text
    assert "one sample per row with a gradient of its own" in text


def test_the_model_card_tells_epsilon(finished: RunResult) -> None:
    card, told = (finished.folder / "adapter" / "README.md").read_text(), finished.result["privacy"]
    assert f"epsilon {told['epsilon']:.3g} of the client with the most and {told['epsilon_median']:.3g} of the" in card
    assert "for adding or removing one training sample of one client (noise 4, clip 0.3)" in card


@pytest.mark.slow
def test_one_client_at_a_time_and_small_passes_give_the_same(tiny: Path, tmp_path: Path, finished: RunResult) -> None:
    alone = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW, "run.stacked_clients=1"], tmp_path / "alone")
    assert_close(alone.folder, finished.folder)
    again = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW], tmp_path / "again")
    assert same_bits(again.folder, finished.folder)


@pytest.mark.slow
def test_a_run_cut_short_goes_on_with_the_same_bits(
    tiny: Path, tmp_path: Path, finished: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.evaluate

    def killed(*arguments: Any) -> Any:
        raise RunError("killed")

    monkeypatch.setattr(training, "evaluate", killed)
    with pytest.raises(RunError, match="killed"):
        run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW], tmp_path / "run")
    monkeypatch.setattr(training, "evaluate", plain)
    resumed = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW], tmp_path / "run")
    assert same_bits(resumed.folder, finished.folder)
    assert resumed.result["privacy"] == finished.result["privacy"]


@pytest.mark.slow
def test_memory_that_gives_out_halves_the_clients(
    tiny: Path, tmp_path: Path, finished: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LoraProblem.sample_gradients

    def crowded(self: LoraProblem, X: torch.Tensor, samples: Any, clients: Any, round: int, step: int) -> Any:
        if len(clients) > 2 and step == 1:
            torch.empty(2**46, dtype=torch.float64)
        return plain(self, X, samples, clients, round, step)

    monkeypatch.setattr(LoraProblem, "sample_gradients", crowded)
    found = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW], tmp_path / "run")
    assert_close(found.folder, finished.folder)
    assert found.result["machine"]["stepped_down"]


@pytest.mark.slow
def test_a_budget_ends_the_run_before_any_client_exceeds_it(tiny: Path, tmp_path: Path, finished: RunResult) -> None:
    epsilon = finished.metrics[1]["epsilon"] * 0.999
    found = run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW, f"privacy.epsilon={epsilon}"], tmp_path / "run")
    assert len(found.metrics) == 1
    assert found.metrics[0]["epsilon"] <= epsilon
    assert found.result["privacy"]["ended_by_budget"]
    assert found.result["privacy"]["epsilon"] <= epsilon
    with pytest.raises(UserError, match=r"privacy.epsilon: found 0.01, but one round with noise=4 takes "):
        run_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW, "privacy.epsilon=0.01"], tmp_path / "none")


@pytest.mark.slow
def test_noise_follows_from_epsilon(tiny: Path) -> None:
    built = job(tiny, *PRIVATE, *FEW, "privacy={level: sample, noise: null, epsilon: 0.7, delta: 1.0e-3, clip: 0.3}")
    assert built.recipe.privacy is not None
    noise = built.recipe.privacy.noise
    assert noise is not None
    sizes = [len(part) for part in built.parts]
    every = {SampledGaussian(noise, q).epsilon(times, 1e-3) for q, times in {*steps_after(built.recipe, sizes, 3)}}
    assert 0.69 < max(every) <= 0.7
    assert built.last_round == 3


def test_poisson_rounds_count_too(tiny: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW, "federation.sampling=poisson"])
    from fedllm.federation.sampling import sample

    expected = [0] * 8
    for round in range(3):
        for client in sample(0, round, 8, 5, 3, "poisson")[0]:
            expected[client] += 2
    assert [each.times for each in steps_after(recipe.for_clients(8), [10] * 8, 3)] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("privacy.clip=null", r"privacy.clip: missing; level=sample needs the largest norm of a sample's gradient"),
        (
            "local={epochs: 2, batch_size: 4}",
            r"privacy: found local.epochs=2, expected local.steps with level=sample",
        ),
        ("algorithm.weights=size", r"privacy: found algorithm.weights=size, expected uniform .*set .*=uniform"),
        ("algorithm.tracking_init=gradient", r"privacy: found algorithm.tracking_init=gradient, expected zero .*"),
        ("algorithm={name: qfedavg}", r"privacy: found QFedAvg, whose clients send numbers made of their loss"),
        ("algorithm={name: moon}", r"privacy: found Moon with level=sample: its clients add a contrast to the loss"),
        ("privacy.delta=null", r"privacy: found noise alone, expected two of epsilon, delta and noise"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_loads(tiny: Path, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(tiny / "recipe.yaml", [*(PRIVATE[:1] if change.startswith("local") else PRIVATE), change])


def test_warnings(tiny: Path) -> None:
    built = job(tiny, *PRIVATE, "privacy.delta=0.2", "privacy.noise=0")
    loud = " ".join(built.warnings)
    assert "privacy.delta=0.2 is not below 1/" in loud
    assert "privacy.noise=0: gradients are clipped and no noise is added" in loud


def test_batch_norm_is_refused_and_group_norm_is_not() -> None:
    from private_clients import private

    normed, plain = full_problem(small_net(), Pixels.draw(8)), full_problem(small_net(norm=False), Pixels.draw(8))
    with pytest.raises(UserError, match=r"set model.norm=group"):
        private(normed, normed.batches.parts)
    private(plain, plain.batches.parts)


@pytest.mark.slow
def test_real_sites_do_the_same_with_draws_of_the_system(tiny: Path, tmp_path: Path) -> None:
    """Without noise and with all samples in every batch nothing is drawn; with noise no two runs are alike."""
    rows = write_rows(tmp_path / "train.csv", 60, seed=0).read_text().splitlines()
    kept = [row for row in rows if not row.endswith(("site3", "site4"))]
    (tmp_path / "train.csv").write_text("\n".join(kept) + "\n")
    files = split_rows(tmp_path / "train.csv", "site", tmp_path / "sites")
    text = (tiny / "recipe.yaml").read_text().replace(str(tiny / "train.csv"), str(tmp_path / "train.csv"))
    recipe = written(tmp_path / "recipe.yaml", yaml.safe_load(text))
    common = [
        "partition={scheme: by_column, column: site, clients: 3}", "federation={rounds: 1, clients_per_round: 3}",
        "data.classes=['0', '1']", "run.stacked_clients=1", "run.device=cpu", "run.trackers=[]",
    ]  # fmt: skip

    def through_sites(name: str, *overrides: str) -> RunResult:
        link = ThreadLink([settings(tmp_path / name, path, path.stem) for path in files])
        return deployed(recipe, [*common, *overrides], tmp_path / name / "run", link)

    quiet = ["privacy={level: sample, noise: 0, delta: 1.0e-3, clip: 0.01}", "local={steps: 2, batch_size: 100}"]
    found = through_sites("quiet", *quiet)
    assert_close(found.folder, simulated(recipe, [*common, *quiet], tmp_path / "simulated").folder)
    first, second = (through_sites(name, *PRIVATE) for name in ("first", "second"))
    assert not same_bits(first.folder, second.folder)
    assert first.metrics[-1]["epsilon"] is None
    assert first.result["privacy"]["epsilon"] is None
    assert first.result["privacy"]["accountant"] == "of each site"
    with pytest.raises(UserError, match=r"privacy.epsilon: found 3 with level=sample, expected none for real sites"):
        through_sites("refused", *PRIVATE, "privacy.epsilon=3")


def test_a_site_is_told_its_epsilon(tiny: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", [*PRIVATE, *FEW])
    (text,) = epsilon_of_site(recipe, 12)
    epsilon = SampledGaussian(4.0, 1 / 3).epsilon(6, 1e-3)
    assert f"epsilon {epsilon:.3f}"[:-1] in text
    assert "of each of this site's 12 samples, where it takes part in all 3 rounds" in text
    assert epsilon_of_site(load_recipe(tiny / "recipe.yaml", FEW), 12) == ()
