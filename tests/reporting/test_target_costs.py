"""The costs up to the target: in the second table, the CSV file and the page."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from made_runs import groups_of, make_run

from fedllm.cli import main
from fedllm.reporting.groups import Group
from fedllm.reporting.summary import csv_text, summarise, summarise_costs

MB = {"bytes_up": [3_000_000] * 4, "bytes_down": [1_000_000] * 4}  # a round takes 3 simulated seconds, V(t) is 4
START = {"bytes_up": 5_000_000, "bytes_down": 5_000_000, "seconds": 1.0, "simulated_seconds": 7.0}


def costs(*folders: Path, targets: Any = ()) -> list[dict[str, str]]:
    found = summarise_costs(groups_of(*folders), targets)
    assert found is not None
    return [dict(zip(found.headings, row, strict=True)) for row in found.rows]


def test_costs_are_summed_up_to_the_round_of_the_target(tmp_path: Path) -> None:
    """Accuracy 0.85 is reached in round 3 of 4: 3 * 4 MB, 3 * 3 s, 3 * 4 vectors."""
    (row,) = costs(make_run(tmp_path / "a", **MB))
    assert row == {
        "run": "fadamgc",
        "MB to target": "12.0",
        "simulated s to target": "9.00",
        "vectors to target": "12.0",
    }


def test_the_costs_before_round_1_count(tmp_path: Path) -> None:
    """10 MB, 7 s, and 2 vectors of each client: x0 down and a gradient up."""
    (row,) = costs(make_run(tmp_path / "a", start=START, **MB))
    assert (row["MB to target"], row["simulated s to target"], row["vectors to target"]) == ("22.0", "16.0", "14.0")


def test_a_target_that_was_not_reached_costs_more_than_the_whole_run(tmp_path: Path) -> None:
    (row,) = costs(make_run(tmp_path / "a", target=0.95, **MB))
    assert (row["MB to target"], row["simulated s to target"], row["vectors to target"]) == (">16.0", ">12.0", ">16.0")
    reached, missed = (make_run(tmp_path / name, target=0.85, seed=seed, scores=scores) for name, seed, scores in (
        ("b", 1, (0.5, 0.9, 0.9, 0.9)), ("c", 2, (0.5, 0.6, 0.7, 0.8))
    ))  # fmt: skip
    (row,) = costs(reached, missed)
    assert row["vectors to target"] == ">16.0 (1 of 2 reached)"


def test_seeds_are_averaged(tmp_path: Path) -> None:
    """Reached in rounds 1 and 3: 4 and 12 vectors."""
    scores = {0: (0.9, 0.9, 0.9, 0.9), 1: (0.5, 0.7, 0.9, 0.8)}
    (row,) = costs(*(make_run(tmp_path / str(seed), seed=seed, scores=found, **MB) for seed, found in scores.items()))
    assert row["vectors to target"] == "8.0 ± 5.7"


def test_each_target_asked_for_has_its_columns(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", **MB)
    targets = [{"accuracy": 0.7}, {"eval_loss": 0.1}]
    (row,) = costs(folder, targets=targets)
    assert (row["MB to accuracy 0.7"], row["MB to eval loss 0.1"]) == ("8.00", "12.0")
    assert (row["vectors to accuracy 0.7"], row["vectors to eval loss 0.1"]) == ("8.00", "12.0")
    (numbers,) = csv.DictReader(csv_text([summarise(groups_of(folder), targets)]).splitlines())
    assert numbers["mb_to_target_mean"] == "12.0"
    assert numbers["simulated_seconds_to_accuracy_0.7_mean"] == "6.0"
    assert numbers["vectors_to_eval_loss_0.1_mean"] == "12.0"


def test_groups_with_other_targets_tell_them(tmp_path: Path) -> None:
    folders = make_run(tmp_path / "a", **MB), make_run(tmp_path / "b", target=0.7, **MB)
    assert [(row["score"], row["MB to target"]) for row in costs(*folders)] == [
        ("accuracy, target 0.85", "12.0"), ("accuracy, target 0.7", "8.00")
    ]  # fmt: skip


def test_there_is_no_table_without_a_target(tmp_path: Path) -> None:
    groups: list[Group] = groups_of(make_run(tmp_path / "a", target=None))
    assert summarise_costs(groups) is None
    (numbers,) = csv.DictReader(csv_text([summarise(groups)]).splitlines())
    assert numbers["mb_to_target_mean"] == ""


def test_an_older_run_without_vectors_has_a_dash(tmp_path: Path) -> None:
    (row,) = costs(make_run(tmp_path / "a", memory=None, **MB))
    assert (row["vectors to target"], row["MB to target"]) == ("-", "12.0")
    (row,) = costs(make_run(tmp_path / "b", memory=None, target=0.95, **MB))
    assert row["vectors to target"] == "-"


@pytest.mark.slow
def test_terminal_files_and_page_have_the_second_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_run(tmp_path / "a", **MB), tmp_path / "out"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert "costs to the target; accuracy, target 0.85" in " ".join(capsys.readouterr().out.split())
    assert "| run | MB to target | simulated s to target | vectors to target |" in (out / "summary.md").read_text()
    assert "costs to the target" in (out / "summary.tex").read_text()
    page = (out / "report.html").read_text()
    assert "<h3>Costs to the target</h3>" in page
    assert '<th class="number">vectors to target</th>' in page


def test_a_target_that_no_model_reaches_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    assert main(["report", str(folder), "--target", "accuracy=75"]) == 2
    assert "--target: found accuracy: 75, expected at most 1" in capsys.readouterr().err
    assert main(["report", str(folder), "--target", "eval_loss=-1"]) == 2
    assert "--target: found eval_loss: -1, expected at least 0" in capsys.readouterr().err
