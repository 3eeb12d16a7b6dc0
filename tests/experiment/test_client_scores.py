"""Every client is evaluated on its own samples, before and after fine-tuning, and so are clients that never train."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapters import same_bits
from jobs import job
from launched import launch, numbers
from repository import REPO
from safetensors.torch import load_file

from fedllm import run_recipe
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment.evaluation import outputs_at
from fedllm.experiment.plan import plan_table
from fedllm.experiment.run import dry_run
from fedllm.experiment.serve import deployable
from fedllm.federation.executor import Executor
from fedllm.reporting.report import report
from fedllm.results.reader import load_run

HELD = ["eval.per_client=0.25", "federation.held_out=1"]
SITES = ["partition={scheme: by_column, column: site, clients: null}", "federation={clients_per_round: 3, rounds: 2}"]
OVERRIDES = [*HELD, *SITES, "local.finetune_steps=3", "federation.tracked_per_round=2", "run.trackers=[]"]


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five sites of which one never trains, with the shares of two processes."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    return run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], folder).folder


def scores(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "client_scores.json").read_text())
    return found


def test_nobody_trains_on_what_clients_are_evaluated_on(tiny: Path) -> None:
    built = job(tiny, *HELD, "federation.held_out=2", "eval.per_client=0.3")
    own, train = built.own, built.dataset.train
    assert own is not None
    assert built.info.num_clients == len(built.parts) == own.training == 6
    assert len(own.places) == 8
    texts = train.texts[0]
    trained = {texts[row] for part in built.parts for row in part}
    lengths = built.problem.samples.lengths
    assert len(own.samples) == sum(map(len, own.places))
    assert sum(map(len, built.parts)) + len(own.samples) <= len(train)
    evaluated = [row for row in range(len(train)) if texts[row] not in trained]
    assert len(own.samples) == len(evaluated), "what nobody trains on is evaluated, also of clients that never train"
    assert sorted(own.samples.lengths.tolist()) == sorted(lengths[evaluated].tolist())


def test_the_recipe_of_the_guide(tiny: Path) -> None:
    page = (REPO / "docs" / "guides" / "client_scores.md").read_text()
    (code,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    built = job(tiny, *(f"{name}={json.dumps(keys)}" for name, keys in yaml.safe_load(code).items()))
    assert built.own is not None
    assert built.own.training == 7
    assert len(built.own.scored) == 8


def test_without_the_keys_the_clients_train_on_all_of_their_samples(tiny: Path) -> None:
    built = job(tiny)
    assert built.own is None
    assert sum(map(len, built.parts)) == len(built.dataset.train)


def test_the_plan_tells_what_is_held_out(tiny: Path) -> None:
    table = plan_table(job(tiny, *HELD))
    cells = {str(name): str(value) for name, value in zip(*(column.cells for column in table.columns), strict=True)}
    assert "samples of 7 clients" in cells["[bold]held out by clients[/]"]
    assert cells["[bold]never train[/]"].startswith("1 clients, scored on ")


@pytest.mark.slow
def test_the_scores_are_those_of_the_final_adapter_on_each_clients_samples(tiny: Path, run: Path) -> None:
    built = job(tiny, *OVERRIDES)
    own = built.own
    assert own is not None
    found = scores(run)
    assert found["round"] == 2
    clients = found["clients"]
    assert [each["client"] for each in clients] == [0, 1, 2, 3, 4]
    assert [each["trains"] for each in clients] == [True] * 4 + [False]
    assert sorted(each["name"] for each in clients) == [f"site{number}" for number in range(5)]
    assert all(each["name"] == f"site{each['in_partition']}" for each in clients)
    names = json.loads((run / "partition.json").read_text())["names"]
    assert [each["name"] for each in clients[:4]] == names

    last = sorted((run / "checkpoints").iterdir())[-1]
    x = load_file(last / "server.safetensors")["x"]
    outputs = outputs_at(built, x, own.samples, Executor())
    for each in clients:
        places = own.places[each["client"]]
        assert each["samples"] == len(places)
        expected = built.task.evaluate(outputs[places], own.samples.targets[places])
        assert each["scores"] == pytest.approx(expected, rel=1e-5)
    entry = load_run(run).per_client
    training = entry["training"]
    assert training["clients"] == 4
    assert training["samples"] == sum(each["samples"] for each in clients[:4])
    whole = built.task.evaluate(outputs[: training["samples"]], own.samples.targets[: training["samples"]])
    for name in ("eval_loss", "accuracy"):
        assert training["scores"][name]["weighted_mean"] == pytest.approx(whole[name], rel=1e-5)
    assert entry["held_out"]["clients"] == 1
    assert training["finetuned"]["eval_loss"]["mean"] != pytest.approx(training["scores"]["eval_loss"]["mean"])
    result = json.loads((run / "result.json").read_text())
    assert result["per_client"] == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["per_client"]


@pytest.mark.slow
def test_fine_tuning_for_an_evaluation_leaves_the_run_as_it_is(tiny: Path, run: Path, tmp_path: Path) -> None:
    """It may change when a run goes on, but what clients hold out may not."""
    plain = [word for word in OVERRIDES if "finetune" not in word]
    other = run_recipe(tiny / "recipe.yaml", [*plain, "eval.every=2", "run.shares=2"], tmp_path / "run").folder
    assert same_bits(other, run)
    assert "finetuned" not in scores(other)["clients"][0]
    with pytest.raises(UserError, match=r"eval.per_client: 0.25 there, 0.5 here"):
        run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "eval.per_client=0.5"], run)
    (other / "result.json").unlink()
    shutil.rmtree(other / "checkpoints" / "000002")
    run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], other)
    assert numbers(other)[-1] == numbers(run)[-1]
    assert scores(other) == scores(run)


@pytest.mark.slow
def test_a_run_whose_last_round_is_over_writes_the_scores_again(tiny: Path, run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    (again / "result.json").unlink()
    (again / "client_scores.json").write_text('{"round": 1, ')
    run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], again)
    assert scores(again) == scores(run)
    assert numbers(again) == numbers(run)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tiny: Path, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    done = launch("-m", "fedllm", "run", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES)
    assert done.returncode == 0, done.stderr
    assert numbers(folder) == numbers(run)
    assert scores(folder) == scores(run)


@pytest.mark.slow
def test_clients_with_heads_of_their_own_are_evaluated_with_them(tiny: Path, tmp_path: Path) -> None:
    """With the rate near 0 a client's own head is that of the start, and the scores are those of a common one."""
    still = [*HELD, *SITES, "federation.rounds=1", "algorithm.lr=1e-12", "run.trackers=[]"]
    own = run_recipe(tiny / "recipe.yaml", [*still, "deployment.keep_local=head"], tmp_path / "own").folder
    common = run_recipe(tiny / "recipe.yaml", still, tmp_path / "common").folder
    for ours, theirs in zip(scores(own)["clients"], scores(common)["clients"], strict=True):
        assert ours["scores"] == pytest.approx(theirs["scores"], rel=1e-4)
    moved = [word for word in OVERRIDES if "rounds" not in word]
    run_recipe(tiny / "recipe.yaml", [*moved, *SITES, "deployment.keep_local=head"], tmp_path / "moved")
    found = scores(tmp_path / "moved")["clients"]
    assert all("finetuned" in each for each in found)


@pytest.mark.slow
def test_the_report_shows_them(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = report([run], tmp_path / "report", formats=["html", "md", "svg"])
    assert {"client_scores.svg", "by_value.svg"} <= {path.name for path in written.files}
    text = (tmp_path / "report" / "summary.md").read_text()
    for heading in ("weighted mean", "worst tenth", "fine-tuned mean", "never train mean", "gap"):
        assert heading in text
    assert "Scores of the clients" in (tmp_path / "report" / "report.html").read_text()


def refused(tiny: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        dry_run(load_recipe(tiny / "recipe.yaml", [*overrides, "run.dir=never"]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["eval.per_client=1"], "eval.per_client: found 1, expected a fraction between 0 and 1"),
        (["local.finetune_steps=3"], "local.finetune_steps: found 3 without eval.per_client"),
        (["local.finetune_steps=0", "eval.per_client=0.2"], "local.finetune_steps: found 0"),
        (["federation.held_out=8"], "federation.held_out: found 8, which is 8 of 8 clients"),
        (["federation.held_out=4"], "federation.clients_per_round: found 5, expected 1 to 4"),
        (["eval.per_client=0.2", "privacy={noise: 1, delta: 1.0e-4}"], "privacy: found with eval.per_client=0.2"),
    ],
)
def test_what_cannot_be_evaluated_is_named(tiny: Path, overrides: list[str], said: str) -> None:
    assert said in refused(tiny, *overrides)


def test_real_sites_have_validation_files_instead(tiny: Path) -> None:
    words = ["deployment.sites=5", "local={steps: 2, epochs: null}", "federation.clients_per_round=3"]
    for key in ("eval.per_client=0.2", "federation.held_out=1"):
        with pytest.raises(UserError, match=f"{key.partition('=')[0]}: found .*site.yaml"):
            deployable(load_recipe(tiny / "recipe.yaml", [*words, key]))


def test_clients_without_a_sample_of_their_own_are_named(tiny: Path, tmp_path: Path) -> None:
    rows = (tiny / "train.csv").read_text().splitlines()
    lonely = next(row for row in rows[1:] if row.endswith("site0"))
    path = tmp_path / "train.csv"
    path.write_text("\n".join([rows[0], lonely, *[row for row in rows[1:] if not row.endswith("site0")]]) + "\n")
    least = "partition={scheme: by_column, column: site, clients: null, min_size: 1}"
    built = job(tiny, f"data.train={path}", *SITES, least, "eval.per_client=0.2", "federation.tracked_per_round=2")
    assert built.own is not None
    assert built.own.scored == [1, 2, 3, 4]
    assert any("1 of 5 clients hold no sample out" in text and "(clients 0)" in text for text in built.warnings)
    same = tmp_path / "same.csv"
    same.write_text("\n".join([rows[0], *(f"one text,{number % 2},site{number % 5}" for number in range(30))]) + "\n")
    with pytest.raises(UserError, match=r"eval.per_client: no client has a sample to be evaluated on"):
        job(tiny, f"data.train={same}", *SITES, "eval.per_client=0.2", "federation.tracked_per_round=2")
