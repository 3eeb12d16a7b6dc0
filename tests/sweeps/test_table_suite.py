"""fedllm suite with a paper's table: its runs go on where they were, and one table has ours beside the paper's."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest
from counted_rounds import counted
from glue_splits import save_task
from tiny_models import save_tiny

import fedllm.experiment.run
import fedllm.experiment.training
from fedllm.cli.commands import main
from fedllm.sweeps.paper_tables import TABLES

HAD = ("qnli", "sst2")  # the tasks whose data the stand-ins have


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hub/ and recipes/: every recipe of the FAdamGC table over a tiny BERT, and some paper's numbers."""
    folder = tmp_path_factory.mktemp("table")
    bert = save_tiny(folder / "bert", "bert")
    recipes = folder / "recipes"
    (recipes / "paper").mkdir(parents=True)
    (recipes / "base.yaml").write_text(
        f"""
model: {{name: {bert}}}
lora: {{rank: 2}}
data: {{max_length: 16}}
partition: {{alpha: 1.0, clients: 4}}
federation: {{rounds: 2, clients_per_round: 2}}
local: {{steps: 1, batch_size: 4}}
eval: {{target: {{accuracy: 0.01}}}}
run: {{local_hub: {folder / "hub"}, threads: 1, checkpoint_every: 1, trackers: []}}
algorithm: fadamgc
algorithms: {{fadamgc: {{lr: 0.01}}, fedavgm: {{lr: 0.1}}}}
"""
    )
    for task in HAD:
        save_task(folder / "hub", task)
    for task in (*TABLES["fadamgc-table2"].tasks, "bbcnews"):
        name = f"glue/{task}" if task in (*HAD, "qqp") else f"package:no_such_package/{task}"
        for model in ("gpt2", "gc_minilm"):
            (recipes / f"{task}_{model}.yaml").write_text(f'extends: base.yaml\ndata: {{name: "{name}"}}\n')
    (recipes / "paper" / "fadamgc_table2.csv").write_text(
        "task,algorithm,rounds,minutes,source\nsst2,fadamgc,30.3 ± 7.3,26.8 ± 7.3,GC\n"
    )
    return folder


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedllm.experiment.run, "_plot", lambda folder: folder / "curves.png")


def table(stand_ins: Path, out: Path, *more: str) -> int:
    return main(["suite", "fadamgc-table2", "--recipes", str(stand_ins / "recipes"), "--out", str(out), *more])


def cells(out: Path, folder: str = "fadamgc-table2") -> dict[tuple[str, str, str], dict[str, str]]:
    with (out / folder / "report" / "table.csv").open() as file:
        return {(row["method"], row["task"], row["quantity"]): row for row in csv.DictReader(file)}


CHOICE = ["--algorithm", "FAdamGC", "--algorithm", "fedavgm", "--task", "sst2", "--task", "qnli"]


@pytest.mark.slow
def test_a_table_goes_on_where_it_was_and_has_ours_beside_the_papers(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = ["--seeds", "0,1"]
    with monkeypatch.context() as patch:
        counted(patch, stop_at=4)  # the last round of the second run
        assert table(stand_ins, tmp_path, *CHOICE, *seeds) == 130
    with monkeypatch.context() as patch:
        rounds = counted(patch)
        assert table(stand_ins, tmp_path, *CHOICE, *seeds) == 0
        assert len(rounds) == 2 * 8 - 3
    said = capsys.readouterr().out
    assert "8 of 8: " in said
    assert "going on after round 1 of 2" in said

    found = cells(tmp_path)
    assert len(found) == 8 * 4 * 2  # every method and data set, rounds and minutes
    run = tmp_path / "fadamgc-table2" / "sst2_gpt2_fadamgc"
    spent = []
    for seed in (0, 1):
        lines = [json.loads(line) for line in Path(f"{run}-s{seed}", "metrics.jsonl").read_text().splitlines()]
        spent.append(lines[0]["simulated_seconds"] / 60)  # every accuracy reaches the target in round 1
    minutes = found["fadamgc", "sst2", "minutes"]
    mean, deviation = (float(word) for word in minutes["ours"].split(" ± "))
    assert mean == pytest.approx(fmean(spent), abs=1e-3)
    assert deviation == pytest.approx(stdev(spent), rel=0.1, abs=1e-5)
    assert minutes["paper"] == "26.8 ± 7.3"
    assert minutes["seeds"] == "0 1"
    assert found["fadamgc", "sst2", "rounds"]["ours"] == "1.0 ± 0.0"
    assert found["fadamgc", "sst2", "rounds"]["paper"] == "30.3 ± 7.3"
    assert found["fedavgm", "qnli", "rounds"]["paper"] == "-"
    done = {(method, task) for (method, task, _), row in found.items() if row["ours"] != "-"}
    assert done == {(method, task) for method in ("fadamgc", "fedavgm") for task in HAD}
    text = (tmp_path / "fadamgc-table2" / "report" / "table.md").read_text()
    assert "| FAdamGC | ours |" in text
    assert "means of 4 trials" in text

    assert "evaluated every round" in text

    with monkeypatch.context() as patch:
        rounds = counted(patch)
        assert table(stand_ins, tmp_path, "--algorithm", "fadamgc", "--task", "sst2") == 0
        assert rounds == []
    assert cells(tmp_path) == found  # what is there of other cells and seeds stays in the table


@pytest.mark.slow
def test_a_run_without_the_target_and_a_run_of_other_settings(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = ["--algorithm", "fadamgc", "--task", "sst2", "eval.target={accuracy: 1.0}"]
    assert table(stand_ins, tmp_path, *choice, "algorithm.lr=1e-9", "run.resume=never") == 0
    assert cells(tmp_path)["fadamgc", "sst2", "rounds"]["ours"] == ">2"
    assert table(stand_ins, tmp_path, "--algorithm", "fedavgm", "--task", "sst2") == 0
    assert "left out: " in (said := capsys.readouterr().out)
    assert "algorithm.lr: 1e-09 there, 0.01 here" in said
    found = cells(tmp_path)
    assert found["fadamgc", "sst2", "rounds"]["ours"] == "-"
    assert found["fedavgm", "sst2", "rounds"]["ours"] == "1"


@pytest.mark.slow
def test_a_task_without_data_is_named_once_and_the_others_go_on(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = counted(monkeypatch)
    methods = ["--algorithm", "fadamgc", "--algorithm", "fedavgm"]
    assert table(stand_ins, tmp_path, *methods, "--small", "federation.rounds=1") == 0
    said = capsys.readouterr().out
    for task, why in (
        ("qqp", "data set 'glue/qqp' was found nowhere"),
        ("20news", "'no_such_package' is not installed"),
    ):
        assert said.count(f"{task} is skipped: ") == 1
        assert why in said
    assert len(rounds) == 2 * len(HAD)
    found = cells(tmp_path, "fadamgc-table2-minilm")
    assert found["fadamgc", "sst2", "rounds"]["ours"] == "1"
    assert found["fadamgc", "qqp", "rounds"]["ours"] == "-"
    assert "compare the order of methods" in (tmp_path / "fadamgc-table2-minilm" / "report" / "table.md").read_text()


def test_a_table_without_any_data_has_failed(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table(stand_ins, tmp_path, "--task", "qqp", "--algorithm", "fadamgc") == 1
    assert "not every run of the table could be made" in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_the_others_go_on(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = ["--algorithm", "fadamgc", "--task", "sst2"]
    (tmp_path / "fadamgc-table2").mkdir(parents=True)
    (tmp_path / "fadamgc-table2" / "sst2_gpt2_fadamgc-s0").write_text("in the way")
    assert table(stand_ins, tmp_path, *choice, "--seeds", "0,1") == 1
    assert "sst2_gpt2_fadamgc-s0 cannot be run: " in capsys.readouterr().out
    assert cells(tmp_path)["fadamgc", "sst2", "rounds"]["seeds"] == "1"


@pytest.mark.slow
def test_a_model_that_cannot_be_had_ends_before_anything_runs(
    stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bert = shutil.copytree(stand_ins / "bert", tmp_path / "bert")
    (bert / "model.safetensors").unlink()
    out = tmp_path / "runs"
    assert table(stand_ins, out, f"model.name={bert}") == 2
    error = capsys.readouterr().err
    assert "fadamgc-table2: model " in error
    assert "has a config but no weights" in error
    assert "The same table with a small model for a CPU: fedllm suite fadamgc-table2 --small" in error
    assert table(stand_ins, out, "--small", f"model.name={bert}") == 2
    assert "--small" not in capsys.readouterr().err
    assert not out.exists()
