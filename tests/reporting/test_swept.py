"""The figure over a swept setting: which runs make a line, its numbers, what is drawn, and the CSV file beside it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from made_runs import groups_of, make_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from fedllm.reporting.groups import group_runs
from fedllm.reporting.report import report
from fedllm.reporting.style import PAPER
from fedllm.reporting.swept import Panel, Point, swept_csv, swept_panels
from fedllm.reporting.swept_figure import swept_figure, without_swept
from fedllm.results.reader import read_runs

LATE = (0.5, 0.6, 0.7, 0.9)  # reaches 0.85 in round 4
EARLY = (0.5, 0.9, 0.9, 0.8)  # in round 2
NEVER = (0.5, 0.6, 0.7, 0.8)


def sweep(folder: Path, key: str, scores: dict[object, list[tuple[float, ...]]], **run: object) -> list[Path]:
    """One run per value of the key and per seed, with the scores of each seed."""
    return [
        make_run(folder / f"{key}={value}-s{seed}", f"{key}={value}", scores=found, seed=seed, **run)
        for value, seeds in scores.items()
        for seed, found in enumerate(seeds)
    ]


def only(folders: list[Path]) -> Panel:
    (panel,) = swept_panels(groups_of(*folders))
    return panel


def drawn(axes: Axes) -> tuple[list[list[list[float]]], dict[tuple[float, float], bool], dict[float, list[float]]]:
    """The lines; whether each marker is open; the bar of each x."""
    lines = [
        line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "None" and len(line.get_xdata()) > 2
    ]
    markers, bars = {}, {}
    for container in axes.containers:
        point, _, segments = container
        markers[tuple(point.get_xydata()[0].tolist())] = to_hex(point.get_markerfacecolor()) == PAPER
        for segment in segments:
            ((x, low), (_, high)) = segment.get_segments()[0].tolist()
            bars[x] = [low, high]
    return lines, markers, bars


# Lines


def test_rounds_to_the_target_over_alpha(tmp_path: Path) -> None:
    scores = {1: [EARLY, EARLY], 0.1: [LATE, LATE], 0.3: [EARLY, LATE]}
    panel = only(sweep(tmp_path, "partition.alpha", scores))
    assert (panel.setting, panel.measure) == ("partition.alpha", "rounds to accuracy 0.85")
    assert panel.lines == {
        "fadamgc": [
            Point(0.1, 4.0, 0.0, seeds=2, reached=2),
            Point(0.3, 3.0, pytest.approx(2**0.5), seeds=2, reached=2),
            Point(1.0, 2.0, 0.0, seeds=2, reached=2),
        ]
    }


def test_a_seed_that_did_not_reach_the_target_counts_with_its_rounds(tmp_path: Path) -> None:
    panel = only(sweep(tmp_path, "partition.alpha", {0.1: [NEVER, NEVER], 0.3: [EARLY, NEVER], 1: [EARLY, EARLY]}))
    (points,) = panel.lines.values()
    assert [(point.y, point.reached, point.is_bound) for point in points] == [(4, 0, True), (3, 1, True), (2, 2, False)]


@pytest.mark.parametrize("target", [None, 0.99])
def test_the_final_score_without_a_target_or_where_no_run_reached_it(tmp_path: Path, target: float | None) -> None:
    scores = {5: [(0.5, 0.6)], 10: [(0.5, 0.7)], 20: [(0.5, 0.8)]}
    panel = only(sweep(tmp_path, "local.steps", scores, target=target))
    assert panel.measure == "final accuracy"
    assert panel.lines == {"fadamgc": [Point(x, y, 0.0, 1, None) for x, y in ((5, 0.6), (10, 0.7), (20, 0.8))]}


def test_the_targets_that_are_asked_for(tmp_path: Path) -> None:
    folders = sweep(tmp_path, "local.steps", {5: [LATE], 10: [EARLY], 20: [EARLY]})
    (panel,) = swept_panels(group_runs(read_runs(folders)[0], [{"f1": 0.45}]))
    assert panel.measure == "rounds to F1 0.45"
    assert [point.y for point in panel.lines["fadamgc"]] == [4, 2, 2]


def test_one_line_per_algorithm_whatever_its_own_rates(tmp_path: Path) -> None:
    folders = [
        *sweep(tmp_path / "a", "federation.clients_per_round", {5: [LATE], 10: [EARLY], 20: [EARLY]}),
        *sweep(tmp_path / "b", "federation.clients_per_round", {5: [LATE], 10: [LATE], 20: [LATE]}, algorithm="fedavg"),
    ]
    panel = only(folders)
    assert {name: [point.y for point in points] for name, points in panel.lines.items()} == {
        "fadamgc": [4, 2, 2],
        "fedavg": [4, 4, 4],
    }


def test_the_second_of_the_betas(tmp_path: Path) -> None:
    scores = {"[0.9, 0.0]": [LATE], "[0.9, 0.3]": [EARLY], "[0.9, 0.99]": [EARLY]}
    panel = only(sweep(tmp_path, "algorithm.betas", scores))
    assert panel.setting == "algorithm.beta2"
    assert panel.values == [0, 0.3, 0.99]
    assert not panel.is_logarithmic


def test_without_tracked_clients_given_all_sampled_ones_are_tracked(tmp_path: Path) -> None:
    scores = {2: [LATE], 5: [EARLY], "null": [EARLY]}
    folders = sweep(tmp_path, "federation.tracked_per_round", scores)
    assert only(folders).values == [2, 5, 10]  # clients_per_round is 10


def test_a_grid_of_two_settings_has_a_panel_for_each(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{k}-{lr}", f"local.steps={k}", f"algorithm.lr={lr}")
        for k in (1, 10, 100)
        for lr in (0.001, 0.01, 0.1)
    ]
    panels = {panel.setting: panel for panel in swept_panels(groups_of(*folders))}
    assert list(panels["algorithm.lr"].lines) == [f"fadamgc local.steps={k}" for k in (1, 10, 100)]
    figure = swept_figure(list(panels.values()))
    assert figure is not None
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        name for panel in panels.values() for name in panel.lines
    }
    assert [axes.get_xlabel() for axes in figure.axes] == list(panels)
    assert list(panels["local.steps"].lines) == [f"fadamgc lr={lr:g}" for lr in (0.001, 0.01, 0.1)]


def test_two_values_make_a_line_where_there_are_several(tmp_path: Path) -> None:
    """As K = 10 and 60 of three methods, or FA-NT at beta2 = 0 and 0.99 beside FAdamGC at four values."""
    pairs = [(name, steps) for name in ("fadamgc", "localadam") for steps in (10, 60)]
    folders = [make_run(tmp_path / f"{name}{steps}", f"local.steps={steps}", algorithm=name) for name, steps in pairs]
    (panel,) = swept_panels(groups_of(*folders))
    assert (panel.setting, panel.values, list(panel.lines)) == ("local.steps", [10, 60], ["fadamgc", "localadam"])
    more = [
        make_run(tmp_path / f"{name}-{beta}", f"algorithm.betas=[0.9, {beta}]", algorithm=name)
        for name, betas in {"fadamgc": (0, 0.3, 0.7), "fa_nt": (0, 0.99), "localadam": (0.99,)}.items()
        for beta in betas
    ]
    (panel,) = swept_panels(groups_of(*more))
    assert {name: len(points) for name, points in panel.lines.items()} == {"fadamgc": 3, "fa_nt": 2}


@pytest.mark.parametrize(
    "values",
    [
        {"partition.alpha": (0.1, 1)},  # two values
        {"lora.dropout": (0.1,), "lora.rank": (4,), "local.steps": (7,)},  # each run differs in another setting
        {"partition.scheme": ("iid", "shards", "dirichlet_clients")},  # words
    ],
)
def test_no_line(tmp_path: Path, values: dict[str, tuple[object, ...]]) -> None:
    pairs = [f"{key}={value}" for key, found in values.items() for value in found]
    assert swept_panels(groups_of(*(make_run(tmp_path / pair, pair) for pair in pairs))) == []
    assert swept_figure([]) is None


@pytest.mark.parametrize(
    ("values", "is_logarithmic"), [((1, 5, 10), False), ((1, 5, 11), True), ((0, 1, 50), False), ((-1, 1, 20), False)]
)
def test_a_logarithmic_axis_from_more_than_a_decade(values: tuple[float, ...], is_logarithmic: bool) -> None:
    panel = Panel("sst2", "local.steps", "accuracy", None, {"fedavg": [Point(x, 0.5, 0.0, 1, None) for x in values]})
    assert panel.is_logarithmic == is_logarithmic
    figure = swept_figure([panel])
    assert figure is not None
    assert figure.axes[0].get_xscale() == ("log" if is_logarithmic else "linear")
    assert figure.axes[0].get_xticks().tolist() == list(values)


# The figure and its files


def test_what_is_drawn(tmp_path: Path) -> None:
    folders = sweep(tmp_path, "partition.alpha", {0.01: [NEVER, NEVER], 0.3: [EARLY, LATE], 1: [EARLY, EARLY]})
    figure = swept_figure([only(folders)])
    assert figure is not None
    (axes,) = figure.axes
    lines, markers, bars = drawn(axes)
    assert lines == [[[0.01, 4], [0.3, 3], [1, 2]]]
    assert markers == {(0.01, 4): True, (0.3, 3): False, (1, 2): False}
    assert bars == {0.01: [4, 4], 0.3: pytest.approx([3 - 2**0.5, 3 + 2**0.5]), 1: [2, 2]}
    note = "mean over seeds; bars: standard deviation; open: target not reached by every seed"
    assert {text.get_text() for text in axes.texts} == {">4", "fadamgc", note}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("partition.alpha", "rounds to accuracy 0.85")
    assert axes.get_ylim()[0] == 0


@pytest.mark.slow
def test_the_report_has_it(tmp_path: Path) -> None:
    folders = sweep(tmp_path, "partition.alpha", {0.1: [NEVER, LATE], 0.3: [EARLY, LATE], 1: [EARLY, EARLY]})
    out = tmp_path / "report"
    names = {path.name for path in report(folders, out).files}
    assert {"swept.csv", "swept.png", "swept.svg"} <= names
    assert "Over the swept setting" in (out / "report.html").read_text()
    rows = list(csv.DictReader(io.StringIO((out / "swept.csv").read_text())))
    assert rows[0] == {
        "task": "glue/sst2", "setting": "partition.alpha", "value": "0.1", "line": "fadamgc",
        "measure": "rounds to accuracy 0.85", "mean": "4.0", "std": "0.0", "seeds": "2", "reached": "1",
        "at_least": "1",
    }  # fmt: skip
    assert [(row["value"], row["mean"], row["at_least"]) for row in rows[1:]] == [
        ("0.3", "3.0", "0"),
        ("1", "2.0", "0"),
    ]
    report(folders[:4], out)
    assert not {path.name for path in out.iterdir()} & {"swept.csv", "swept.png", "swept.svg"}


def test_unfinished_runs_are_left_out_and_named(tmp_path: Path) -> None:
    folders = sweep(tmp_path, "partition.alpha", {0.1: [LATE], 0.3: [EARLY], 1: [EARLY]})
    stopped = make_run(tmp_path / "stopped", "partition.alpha=3", scores=EARLY[:2], finished=False)
    groups = groups_of(*folders, stopped)
    (panel,) = swept_panels(groups)
    assert panel.values == [0.1, 0.3, 1]
    (line,) = without_swept(groups, swept_panels(groups))
    assert "partition.alpha=3" in line
    assert "unfinished" in line
    assert without_swept(groups[:2], swept_panels(groups[:2])) == []


def test_csv_of_scores_has_no_count_of_reached_seeds() -> None:
    panel = Panel("sst2", "local.steps", "f1", None, {"fedavg": [Point(5, 0.25, 0.0, 1, None)]})
    assert swept_csv([panel]).splitlines()[1] == "sst2,local.steps,5,fedavg,final F1,0.25,,1,,0"
