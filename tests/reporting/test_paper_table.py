"""A paper's table beside ours: means, deviations, runs without the target, and averages, worked out by hand."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_run
from repository import REPO
from rich.console import Console

from fedllm.reporting.paper_table import (
    AVERAGE,
    GIB,
    LOSS,
    MINUTES,
    ROUNDS,
    SCORE,
    VECTORS,
    PaperTableReport,
    read_printed,
)
from fedllm.reporting.quantities import mean_and_deviation
from fedllm.reporting.score_table import Beside
from fedllm.results.reader import load_run
from fedllm.results.run_record import RunRecord
from fedllm.sweeps.paper_tables import TABLES

METHODS = {"fedavg": "FedAvg", "fadamgc": "FAdamGC"}


def run(folder: Path, name: str, *scores: float, seed: int = 0, **more: object) -> RunRecord:
    return load_run(make_run(folder / f"{name}-s{seed}", scores=scores, seed=seed, **more))  # type: ignore[arg-type]


def costs(runs: dict[tuple[str, str], list[RunRecord]], **more: object) -> PaperTableReport:
    return PaperTableReport("caption", METHODS, ("sst2",), (ROUNDS, MINUTES), runs, {}, **more)  # type: ignore[arg-type]


def test_rounds_and_minutes_to_the_target(tmp_path: Path) -> None:
    """Targets in rounds 2 and 4 of 30 simulated seconds each: 3 ± sqrt 2 rounds, and 1.5 ± sqrt 0.5 minutes."""
    runs = [
        run(tmp_path, "a", 0.1, 0.9, 0.9, 0.9, seed=0, simulated=30.0),
        run(tmp_path, "b", 0.1, 0.1, 0.1, 0.9, seed=1, simulated=30.0),
    ]
    table = costs({("fadamgc", "sst2"): runs})
    assert table.ours("fadamgc", "sst2", ROUNDS) == "3.0 ± 1.4"
    assert table.ours("fadamgc", "sst2", MINUTES) == "1.50 ± 0.71"
    assert table.ours("fedavg", "sst2", ROUNDS) == "-"
    assert table.headings == ("method", "whose", "sst2 rounds", "sst2 minutes")
    assert [line[:2] for line in table.lines()] == [
        ("FedAvg", "ours"), ("FedAvg", "paper"), ("FAdamGC", "ours"), ("FAdamGC", "paper"),
    ]  # fmt: skip
    assert table.all_notes() == ["Ours: mean ± standard deviation; seeds 0, 1."]


def test_what_a_client_sends_and_receives_until_the_target(tmp_path: Path) -> None:
    """3.5 vectors a round, for two rounds, of 2**28 float32 values, which are a GiB."""
    more = {"vectors_per_round": {"sent": 3.5, "derived": 3.5}, "trainable_parameters": 2**28}
    runs = {("fadamgc", "sst2"): [run(tmp_path, "a", 0.1, 0.9, 0.9, told=more)]}
    table = PaperTableReport("caption", METHODS, ("sst2",), (VECTORS, GIB), runs, {})
    assert table.ours("fadamgc", "sst2", VECTORS) == "7.0"
    assert table.ours("fadamgc", "sst2", GIB) == "7.00"


def test_the_time_before_round_1_counts(tmp_path: Path) -> None:
    """A minute for the full gradients, and two rounds of half a minute."""
    start = {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0, "simulated_seconds": 60.0}
    table = costs({("fadamgc", "sst2"): [run(tmp_path, "a", 0.1, 0.9, simulated=30.0, start=start)]})
    assert table.ours("fadamgc", "sst2", MINUTES) == "2.0"
    assert table.ours("fadamgc", "sst2", ROUNDS) == "2"


def test_runs_that_did_not_reach_the_target(tmp_path: Path) -> None:
    """The shortest of them says what was not enough; a mean over the others alone would be too low."""
    never = run(tmp_path, "never", 0.1, 0.2, 0.3, seed=0, simulated=30.0)
    reached = run(tmp_path, "reached", 0.9, 0.9, seed=1, simulated=30.0)
    assert costs({("fadamgc", "sst2"): [never]}).ours("fadamgc", "sst2", ROUNDS) == ">3"
    assert costs({("fadamgc", "sst2"): [never]}).ours("fadamgc", "sst2", MINUTES) == ">1.5"
    both = costs({("fadamgc", "sst2"): [never, reached]})
    assert both.ours("fadamgc", "sst2", ROUNDS) == ">3 (1 of 2 reached)"
    assert both.ours("fadamgc", "sst2", MINUTES) == ">1.5 (1 of 2 reached)"


def scores(folder: Path) -> PaperTableReport:
    """Two tasks; the second has one seed."""
    runs = {
        ("fadamgc", "cola"): [run(folder, "a", 0.5, seed=0), run(folder, "b", 0.7, seed=1)],
        ("fadamgc", "rte"): [run(folder, "c", 0.9, 0.8, seed=1)],
    }
    printed = {
        ("fedavg", "cola", SCORE): "60.00 ± 0.10", ("fedavg", "rte", SCORE): "70.00 ± 0.10",
        ("fedavg", AVERAGE, SCORE): "64.00 ± 0.10", ("fadamgc", "cola", SCORE): "61|62",
    }  # fmt: skip
    return PaperTableReport("A [b]", METHODS, ("cola", "rte"), (SCORE,), runs, printed, ("cola", "rte"), ("note",))


def test_scores_and_their_average(tmp_path: Path) -> None:
    """The final scores times 100; the average is over the seeds that have every task: (70 + 80) / 2 of seed 1."""
    table = scores(tmp_path)
    assert table.headings == ("method", "whose", "cola", "rte", "average")
    assert table.lines() == [
        ("FedAvg", "ours", "-", "-", "-"),
        ("FedAvg", "paper", "60.00 ± 0.10", "70.00 ± 0.10", "64.00 ± 0.10"),
        ("FAdamGC", "ours", "60 ± 14", "80.00", "75.00"),
        ("FAdamGC", "paper", "61|62", "-", "-"),
    ]


def test_training_losses_are_those_of_the_last_round(tmp_path: Path) -> None:
    runs = [run(tmp_path, "a", 0.5, 0.6, seed=0), run(tmp_path, "b", 0.5, 0.6, 0.7, seed=1)]
    losses = [one.rounds[-1]["train_loss"] for one in runs]
    printed = {("fadamgc", "cifar100", SCORE): "63.01", ("fadamgc", "cifar100", LOSS): "0.480"}
    table = PaperTableReport("caption", METHODS, ("cifar100",), (SCORE, LOSS), {("fadamgc", "cifar100"): runs}, printed)
    assert losses[0] != losses[1] != runs[1].rounds[0]["train_loss"]
    assert table.headings == ("method", "whose", "cifar100 score", "cifar100 train loss")
    assert table.ours("fadamgc", "cifar100", LOSS) == mean_and_deviation(losses, 3)
    assert table.lines()[3] == ("FAdamGC", "paper", "63.01", "0.480")
    assert any("training losses are means over the local steps of the last round" in one for one in table.all_notes())
    unknown = make_run(tmp_path / "none-s0", scores=[0.5])
    metrics = (unknown / "metrics.jsonl").read_text()
    (unknown / "metrics.jsonl").write_text(re.sub(r'"train_loss": [^,]*', '"train_loss": null', metrics))
    assert replace(table, runs={("fadamgc", "cifar100"): [load_run(unknown)]}).ours("fadamgc", "cifar100", LOSS) == "-"


def test_a_printed_average_that_is_not_the_mean_of_its_row_is_noted(tmp_path: Path) -> None:
    assert scores(tmp_path).all_notes() == [
        "Ours: mean ± standard deviation; the seeds of each cell are in table.csv.",
        "Our scores are of the last round, on the validation split, times 100. accuracy: cola, rte.",
        "note",
        "Printed averages that are not the means of the printed rows; these means are: FedAvg 65.00.",
    ]


def test_a_printed_cell_that_is_no_number_gives_no_note(tmp_path: Path) -> None:
    table = scores(tmp_path)
    assert "not the means" not in str(
        replace(table, printed={**table.printed, ("fedavg", "rte", SCORE): "?"}).all_notes()
    )


def test_five_averages_of_the_fedadamw_paper_are_not_the_means_of_their_rows() -> None:
    """Table 3 prints 77.82, 78.33, 78.32, 77.17 and 81.79 for them."""
    table = TABLES["fedadamw-table3"]
    read = {m: Beside.read(REPO / "recipes" / "paper" / f"glue_roberta_{m}.csv", table.tasks) for m in table.methods}
    printed = {(method, task, SCORE): cell for method, column in read.items() for task, cell in column.cells.items()}
    (note,) = PaperTableReport("", table.methods, table.tasks, (SCORE,), {}, printed, table.tasks).all_notes()
    assert note.endswith("SCAFFOLD 78.10, FedCM 78.61, FedAdam 78.61, FedLADA 77.46, FedAdamW 81.22.")


def test_the_files(tmp_path: Path) -> None:
    table = scores(tmp_path)
    table.write(tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    assert text.startswith("A \\[b\\]\n\n| method | whose | cola | rte | average |\n| --- | --- | --: | --: | --: |\n")
    assert "| FAdamGC | paper | 61\\|62 | - | - |" in text
    assert text.endswith("\n- note\n- " + table.all_notes()[-1] + "\n")
    with (tmp_path / "report" / "table.csv").open() as file:
        rows = {(row["method"], row["task"]): row for row in csv.DictReader(file)}
    assert len(rows) == 2 * 3
    assert rows["fadamgc", "cola"] == {
        "method": "fadamgc", "task": "cola", "quantity": "score", "ours": "60 ± 14", "paper": "61|62", "seeds": "0 1",
    }  # fmt: skip


def test_the_terminal_shows_the_table_or_where_it_is_narrow_a_line_per_task_and_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scores(tmp_path)
    for width, words in (
        (120, ["method", "whose", "cola", "rte", "average"]),
        (60, ["task", "method", "score", "paper"]),
    ):
        console = Console(width=width)
        monkeypatch.setattr("fedllm.reporting.paper_table.console", console)
        with console.capture() as said:
            console.print(table.rich())
        lines = [line.split() for line in said.get().splitlines() if line.strip()]
        assert lines[0] == ["A", "[b]"]
        assert lines[1] == words
        assert "…" not in said.get()
    shown = [(task, name) for task in ("cola", "rte", "average") for name in METHODS.values()]
    assert [tuple(line[:2]) for line in lines if line[0] in ("cola", "rte", "average")] == shown
    assert ["cola", "FAdamGC", "60", "±", "14", "61|62"] in lines
    assert ["average", "FedAvg", "-", "64.00", "±", "0.10"] in lines


def test_two_quantities_at_80_columns_have_each_task_above_its_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of rounds and minutes with their deviations is on one line, and no name is cut."""
    table = TABLES["fadamgc-table2-images"]
    runs = {}
    for task in table.tasks:
        done = [run(tmp_path, task, 0.1, 0.9, seed=seed, simulated=5000.0 + 900 * seed) for seed in (0, 1)]
        runs |= {(method, task): done for method in table.methods}
    path = REPO / "recipes" / "paper" / "fadamgc_table2_images.csv"
    printed = read_printed(path, (ROUNDS, MINUTES))
    report = PaperTableReport("caption", table.methods, table.tasks, (ROUNDS, MINUTES), runs, printed)
    console = Console(width=80)
    monkeypatch.setattr("fedllm.reporting.paper_table.console", console)
    with console.capture() as said:
        console.print(report.rich())
    lines = [line.split() for line in said.get().splitlines() if line.strip()]
    assert lines[1] == ["method", "rounds", "paper", "minutes", "paper"]
    assert lines.count(["tiny_imagenet"]) == 1
    row = ["SCAFFOLD-M", "2.0", "±", "0.0", "544.3", "±", "59.9", "182", "±", "21", "157.8", "±", "17.38"]
    assert row in lines
    assert len(lines) == 3 + 3 * 9


@pytest.mark.parametrize("name", TABLES)
def test_the_methods_of_a_table_are_names_that_a_terminal_shows(name: str) -> None:
    assert all(label.isprintable() for label in TABLES[name].methods.values())
