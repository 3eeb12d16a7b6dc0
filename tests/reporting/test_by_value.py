"""Scores of each value of a column, and answers, in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import groups_of, make_run

from fedllm.common.errors import UserError
from fedllm.reporting.by_value import value_figure
from fedllm.reporting.report import report
from fedllm.results.reader import load_run


def scores(accuracy: float | None) -> dict[str, float | None]:
    return {"eval_loss": 0.5, "accuracy": accuracy}


def by(**values: tuple[int, float, float | None]) -> dict[str, object]:
    """value=(samples, before, after)."""
    told = {
        name: {"samples": count, "start": scores(before), "final": scores(after)}
        for name, (count, before, after) in values.items()
    }
    return {"by": {"column": "site", "values": told}}


ANSWER = {"sample": 3, "prompt": "list <files>", "reference": "ls", "before": "I can help", "after": "ls -l"}


def test_the_figure_has_a_row_for_each_value(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", told=by(north=(5, 0.2, 0.6), south=(9, 0.4, 0.5)))
    second = make_run(tmp_path / "b", seed=1, told=by(north=(5, 0.2, 0.8), south=(9, 0.4, None)))
    figure = value_figure(groups_of(first, second))
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["south (9)", "north (5)"]
    before, after = (dots.get_offsets().tolist() for dots in axes.collections)
    assert before == [[0.4, 0.0], [0.2, 1.0]]
    assert after == [pytest.approx([0.5, 0.0]), pytest.approx([0.7, 1.0])], "a score that is null has no part"


def test_of_many_values_those_with_the_most_samples_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", told=by(**{f"v{size}": (size, 0.1, 0.2) for size in range(1, 61)}))
    figure = value_figure(groups_of(run))
    assert figure is not None
    labels = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert labels == {f"v{size} ({size})" for size in range(21, 61)}


def test_runs_without_a_column_have_no_figure(tmp_path: Path) -> None:
    assert value_figure(groups_of(make_run(tmp_path / "a"))) is None


@pytest.mark.slow
def test_the_page_has_the_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", told=by(north=(5, 0.2, 0.6)), answers=[ANSWER])
    written = report([run], tmp_path / "report", formats=["html", "svg"]).files
    text = (tmp_path / "report" / "report.html").read_text()
    assert "list &lt;files&gt;" in text
    assert "ls -l" in text
    assert (tmp_path / "report" / "by_value.svg") in written
    assert load_run(run).answers == [ANSWER]


@pytest.mark.parametrize(
    ("told", "answers", "said"),
    [
        ({"by": {"column": "site"}}, [], "result.json: by is {'column': 'site'}, expected a column and the scores"),
        ({}, [{**ANSWER, "after": 3}], "samples.jsonl, line 1: after is 3, expected a word; damaged"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, told: dict[str, object], answers: list[dict[str, object]], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_run(make_run(tmp_path / "a", told=told, answers=answers))
    assert said in str(caught.value)
