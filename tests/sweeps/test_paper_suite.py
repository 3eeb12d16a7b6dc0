"""fedllm suite: every task runs, an interrupted suite goes on where it was, and all ends in one table."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from counted_rounds import counted
from glue_splits import save_task
from repository import REPO
from tiny_models import save_tiny

import fedllm.experiment.run
import fedllm.experiment.training
from fedllm.algorithms import algorithm_names
from fedllm.cli.commands import main
from fedllm.reporting.score_table import Beside
from fedllm.sweeps import suite_plan
from fedllm.sweeps.suite_plan import SUITES

GLUE = SUITES["glue"].tasks


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hub/, the seven tasks in small, and recipes/<task>_tiny.yaml over a tiny BERT."""
    folder = tmp_path_factory.mktemp("suite")
    bert = save_tiny(folder / "bert", "bert")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "base.yaml").write_text(
        f"""
model: {{name: {bert}}}
lora: {{rank: 2}}
data: {{max_length: 16}}
partition: {{alpha: 1.0, clients: 4}}
federation: {{rounds: 2, clients_per_round: 2}}
local: {{steps: 1, batch_size: 4}}
run: {{local_hub: {folder / "hub"}, threads: 1, checkpoint_every: 1}}
algorithm: fedadamw
algorithms: {{fedadamw: {{lr: 0.01}}, fedavg: {{lr: 0.1}}}}
"""
    )
    for task in GLUE:
        save_task(folder / "hub", task)
        (folder / "recipes" / f"{task}_tiny.yaml").write_text(f"extends: base.yaml\ndata: {{name: glue/{task}}}\n")
    return folder


def glue(stand_ins: Path, out: Path, *more: str) -> int:
    places = ["--recipes", str(stand_ins / "recipes"), "--out", str(out)]
    return main(["suite", "glue", "--model", "tiny", *places, *more])


def table(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "scores.csv").open() as file:
        return {row["task"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_an_interrupted_suite_goes_on_where_it_was_and_ends_in_one_table(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fedllm.experiment.run, "_plot", lambda folder: folder / "curves.png")
    with monkeypatch.context() as patch:
        counted(patch, stop_at=4)  # the last round of the second task
        assert glue(stand_ins, tmp_path) == 130
    report = tmp_path / "report-glue-tiny-fedadamw-s0"
    assert not report.exists()
    assert (tmp_path / "cola_tiny_fedadamw-s0" / "result.json").is_file()

    with monkeypatch.context() as patch:
        rounds = counted(patch)
        assert glue(stand_ins, tmp_path) == 0
        assert len(rounds) == 2 * 7 - 3
    said = capsys.readouterr().out
    assert "7 of 7: mnli_tiny_fedadamw" in said
    assert "going on after round 1 of 2" in said

    lines = table(report)
    assert list(lines) == [*GLUE, "average"]
    finals = []
    for task in GLUE:
        result = json.loads((tmp_path / f"{task}_tiny_fedadamw-s0" / "result.json").read_text())
        finals.append(result["final"][result["primary"]])
        assert lines[task]["final"].split(" / ")[0] == f"{100 * finals[-1]:.2f}"
        assert lines[task]["rounds"] == "2"
    assert lines["average"]["final"] == f"{100 * fmean(finals):.2f}"
    metrics = {task: line["metric"] for task, line in lines.items()}
    assert metrics["cola"] == "Matthews correlation"
    assert metrics["mrpc"] == metrics["qqp"] == "accuracy / F1"
    assert {metrics[task] for task in ("rte", "sst2", "qnli", "mnli")} == {"accuracy"}
    assert (
        "fedadamw, tiny, dirichlet_classes 1 over 4 clients, 2 per round, seed 0" in (report / "scores.md").read_text()
    )

    with monkeypatch.context() as patch:
        rounds = counted(patch)
        assert glue(stand_ins, tmp_path) == 0
        assert rounds == []


def test_a_signal_ends_the_suite_after_the_round(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_round: Callable[..., Any] = fedllm.experiment.training.run_round

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return run_round(*arguments)

    monkeypatch.setattr(fedllm.experiment.training, "run_round", signalled)
    assert glue(stand_ins, tmp_path) == 128 + signal.SIGTERM
    assert "cola_tiny_fedadamw-s0: stopped after round 1; the same command goes on" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cola_tiny_fedadamw-s0"]
    assert [path.name for path in tmp_path.glob("*/checkpoints/*")] == ["000001"]


@pytest.mark.slow
def test_other_scores_stand_beside_ours(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fedllm.experiment.run, "_plot", lambda folder: folder / "curves.png")
    recipes = shutil.copytree(stand_ins / "recipes", tmp_path / "recipes")
    (recipes / "paper").mkdir()
    (recipes / "paper" / "glue_tiny_fedavg.csv").write_text(
        "task,final\ncola,12.34\nqqp, 80.1 / 70.2\nrte,[b]|\naverage,55.50\n"
    )
    places = ["--recipes", str(recipes), "--out", str(tmp_path)]
    words = ["suite", "glue", "--model", "tiny", *places, "federation.rounds=1"]
    assert main([*words, "--algorithm", "fedavg"]) == 0
    lines = table(tmp_path / "report-glue-tiny-fedavg-s0")
    found = {task: line["glue_tiny_fedavg"] for task, line in lines.items()}
    assert found == {
        **dict.fromkeys(GLUE, "-"),
        "cola": "12.34",
        "rte": "[b]|",
        "qqp": "80.1 / 70.2",
        "average": "55.50",
    }
    assert all(line["final"] != line["glue_tiny_fedavg"] for line in lines.values())
    assert "[b]|" in capsys.readouterr().out
    assert r"| \[b\]\| |" in (tmp_path / "report-glue-tiny-fedavg-s0" / "scores.md").read_text()

    written = tmp_path / "report-glue-tiny-fedavg-s0" / "scores.csv"
    assert main([*words, "--algorithm", "fedadamw", "--beside", str(written)]) == 0
    beside = table(tmp_path / "report-glue-tiny-fedadamw-s0")
    ours = {task: line["final"] for task, line in lines.items()}
    assert {task: line["report-glue-tiny-fedavg-s0"] for task, line in beside.items()} == ours
    assert "glue_tiny_fedavg" not in beside["cola"]  # nothing of another algorithm's is taken unasked


@pytest.mark.parametrize("path", sorted((REPO / "recipes" / "paper").glob("glue_*.csv")), ids=lambda path: path.stem)
def test_published_scores_are_those_of_a_suite_and_say_whose_they_are(path: Path) -> None:
    suite, model, algorithm = path.stem.split("_", 2)
    column = Beside.read(path, SUITES[suite].tasks)
    assert model in SUITES[suite].models
    assert algorithm in algorithm_names()
    assert column.heading == "FedAdamW paper, Table 3"
    assert list(column.cells) == [*GLUE, "average"]
    for cell in column.cells.values():
        mean, deviation = map(float, cell.split(" ± "))
        assert 0 < deviation < 1 < mean < 100


def test_scores_as_a_spreadsheet_saves_them(tmp_path: Path) -> None:
    """With a byte order mark, a column more, and a row that ends early."""
    path = tmp_path / "other.csv"
    path.write_bytes(b"\xef\xbb\xbftask,final,note\r\ncola,12.3,x\r\nrte\r\n")
    assert Beside.read(path, GLUE) == Beside("other", {"cola": "12.3", "rte": "-"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("", "found no rows, expected a CSV with the columns task and final"),
        ("name,score\ncola,1\n", "found name, score, expected a CSV with the columns task and final"),
        ("task,final\nqpp,1\n", "task: found 'qpp' (did you mean 'qqp'?), expected cola"),
        ("task,final\ncola,1\nrte,2\ncola,3\n", "task: found 'cola' twice, expected one row per task"),
        ("final,task\n1\n", "task: found '', expected cola"),
    ],
)
def test_scores_to_show_that_cannot_be_read_end_before_anything_runs(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "other.csv"
    if text is not None:
        path.write_text(text)
    assert glue(stand_ins, tmp_path / "runs", "--beside", str(path)) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert said in error
    assert not (tmp_path / "runs").exists()


def test_a_task_that_cannot_be_run_is_named_and_the_others_go_on(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fedllm.experiment.run, "_plot", lambda folder: folder / "curves.png")
    hub = tmp_path / "hub"
    for task in ("sst2", "mrpc"):
        shutil.copytree(stand_ins / "hub" / "datasets" / "glue" / task, hub / "datasets" / "glue" / task)
    less = [f"run.local_hub={hub}", "federation.rounds=1"]
    assert glue(stand_ins, tmp_path / "runs", "--algorithm", "fedavg", *less) == 1
    assert "cola_tiny_fedavg cannot be run: data set 'glue/cola' was found nowhere" in capsys.readouterr().out
    lines = table(tmp_path / "runs" / "report-glue-tiny-fedavg-s0")
    assert [task for task, line in lines.items() if line["final"] != "-"] == ["sst2", "mrpc"]
    recipe = (tmp_path / "runs" / "sst2_tiny_fedavg-s0" / "recipe.yaml").read_text()
    assert "name: fedavg" in recipe
    assert "lr: 0.1" in recipe


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "robreta"], "model: found 'robreta' (did you mean 'roberta'?), expected one of roberta, minilm"),
        (["--algorithm", "fedadan"], "unknown algorithm 'fedadan'"),
        (["--recipes", "nowhere"], "nowhere: no such folder; name that of the recipes"),
        (["run.dir=x"], "run.dir: found x, but every run of a suite has its own folder; give --out"),
        (["federation.round=1"], "did you mean 'rounds'?"),
    ],
)
def test_mistakes_end_before_anything_runs(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert glue(stand_ins, tmp_path / "runs", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_algorithm_without_settings_in_the_recipes_is_said(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = [f"run.local_hub={tmp_path}"]
    assert glue(stand_ins, tmp_path / "runs", "--algorithm", "fedcm", *nothing) == 1
    assert "cola_tiny.yaml lists no settings for fedcm: it runs with its own defaults" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "expected", "said"),
    [
        (True, "roberta", "model: roberta"),
        (False, "minilm", "has a config but no weights"),
        (None, "minilm", "model: minilm, because nobody/none cannot be had here"),
    ],
)
def test_the_papers_model_is_the_default_where_it_can_be_had_and_else_the_packaged_one(
    stand_ins: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    weights: bool | None,
    expected: str,
    said: str,
) -> None:
    bert = shutil.copytree(stand_ins / "bert", tmp_path / "bert")
    if not weights:
        (bert / "model.safetensors").unlink()
    name = "nobody/none" if weights is None else str(bert)
    text = f"data: {{name: glue/cola}}\nalgorithm: fedavg\nmodel: {{name: {name}}}\n"
    (tmp_path / "cola_roberta.yaml").write_text(text)
    assert suite_plan.default_model("glue", recipes=tmp_path) == expected
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("target", "name"), [("glue-all", "glue"), ("20news", "20news"), ("table", "fadamgc-table2")])
def test_make_runs_the_suite(target: str, name: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    env = {"PATH": os.environ["PATH"]}  # nothing of the make that runs the tests
    choices = ["MODEL=minilm", "ALGORITHM=localadam", "ARGS=federation.rounds=2 run.seed=1"]
    for given, expected in (
        (choices, f"suite {name} --model minilm --algorithm localadam federation.rounds=2 run.seed=1"),
        ([], f"suite {name}"),
    ):
        shown = subprocess.run(
            ["make", "-n", target, *given], cwd=REPO, env=env, capture_output=True, text=True, check=True
        )
        assert shown.stdout.splitlines()[-1].split() == [".venv/bin/fedllm", *expected.split()]
