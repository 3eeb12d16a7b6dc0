"""The classes' scores in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import column, groups_of, make_run

from fedllm.common.errors import UserError
from fedllm.reporting.class_scores import confusion_figure
from fedllm.reporting.summary import summarise_classes
from fedllm.results.reader import load_run


def classes(right: int) -> dict[str, object]:
    """Ten samples of each of two classes; of the first `right` are found, of the second all."""
    return {
        "by_class": {
            "names": ["ill", "well"], "samples": [10, 10], "recall": [right / 10, 1.0], "precision": [1.0, 0.5],
            "auroc": [0.9, 0.9], "balanced_accuracy": (right / 10 + 1) / 2, "macro_auroc": 0.9,
            "confusion": [[right, 10 - right], [0, 10]], "no_answer": [0, 0],
        }
    }  # fmt: skip


def test_the_table_and_the_matrices(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", told=classes(4))
    second = make_run(tmp_path / "b", seed=1, told=classes(6))
    other = make_run(tmp_path / "c", algorithm="fedavg", told=classes(9))
    groups = groups_of(first, second, other)
    summary = summarise_classes(groups)
    assert summary is not None
    assert [row[1] for row in summary.rows] == ["0.750 ± 0.071", "0.9500"]
    assert [row[summary.headings.index("lowest recall")] for row in summary.rows] == ["0.50 ± 0.14", "0.9000"]
    assert (1, 1) in summary.best, "the highest is the best"
    figure = confusion_figure(groups)
    assert figure is not None
    shares = [axes.collections[0].get_array().tolist() for axes in figure.axes]
    assert shares == [[[0.5, 0.5], [0.0, 1.0]], [[0.9, pytest.approx(0.1)], [0.0, 1.0]]]
    assert column(groups, "best"), "the table of scores stays"


def test_runs_without_them_have_neither(tmp_path: Path) -> None:
    groups = groups_of(make_run(tmp_path / "a"))
    assert summarise_classes(groups) is None
    assert confusion_figure(groups) is None


def test_damaged_scores_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"result.json: by_class is .*, expected the scores of each class; damaged"):
        load_run(make_run(tmp_path / "a", told={"by_class": {"names": ["a"]}}))
