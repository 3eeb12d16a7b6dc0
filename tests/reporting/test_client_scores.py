"""The clients' scores in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import groups_of, make_run

from fedllm.common.errors import UserError
from fedllm.reporting.by_value import value_figure
from fedllm.reporting.client_scores import score_figure
from fedllm.reporting.summary import summarise_clients
from fedllm.results.client_scores import OfClient, spread
from fedllm.results.reader import load_run


def client(number: int, score: float | None, trains: bool = True, name: str | None = None) -> OfClient:
    return OfClient(
        client=number, in_partition=number, name=name, trains=trains, samples=5, scores={"accuracy": score},
    )  # fmt: skip


def run_with(folder: Path, clients: list[OfClient], *overrides: str, **given: Any) -> Path:
    training = [each for each in clients if each["trains"]]
    never = [each for each in clients if not each["trains"]]
    entry = {
        kind: {"clients": len(group), "samples": 5 * len(group), **spread(group)}
        for kind, group in (("training", training), ("held_out", never))
        if group
    }
    run = make_run(folder, *overrides, scores=(0.5,), target=None, per_client=[entry], **given)
    (run / "client_scores.json").write_text(json.dumps({"round": 1, "clients": clients}))
    return run


def test_the_table_and_the_lines_are_means_over_seeds(tmp_path: Path) -> None:
    first = run_with(tmp_path / "a", [client(0, 0.2), client(1, 0.6), client(2, 0.4, trains=False)])
    second = run_with(tmp_path / "b", [client(0, 0.8), client(1, 0.4), client(2, 0.4, trains=False)], seed=1)
    groups = groups_of(first, second)
    summary = summarise_clients(groups)
    assert summary is not None
    cells = dict(zip(summary.headings, summary.rows[0], strict=True))
    assert cells["mean"] == "0.50 ± 0.14"
    assert cells["worst tenth"] == "0.30 ± 0.14"
    assert cells["gap"] == "0.10 ± 0.14"
    assert "fine-tuned mean" not in cells
    figure = score_figure(groups)
    assert figure is not None
    trained, never = figure.axes[0].lines
    assert trained.get_ydata() == pytest.approx([0.3, 0.7]), "by rank"
    assert trained.get_xdata() == pytest.approx([25, 75])
    assert never.get_ydata() == pytest.approx([0.4])


def test_a_score_that_is_no_number_is_not_drawn(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", [client(0, None), client(1, 0.6)])
    assert score_figure(groups_of(run)) is None
    summary = summarise_clients(groups_of(run))
    assert summary is None or "mean" not in summary.headings


def test_clients_that_a_column_names_are_drawn_by_name(tmp_path: Path) -> None:
    scheme = "partition={scheme: by_column, column: hospital, clients: null}"
    run = run_with(tmp_path / "a", [client(0, 0.2, name="north"), client(1, 0.6, name="south")], scheme)
    figure = value_figure(groups_of(run))
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["north (5)", "south (5)"]
    assert axes.get_ylabel().startswith("hospital")


def test_runs_without_them_have_neither(tmp_path: Path) -> None:
    groups = groups_of(make_run(tmp_path / "a"))
    assert summarise_clients(groups) is None
    assert score_figure(groups) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", [client(0, 0.2)])
    (run / "client_scores.json").write_text('{"round": 1, "clients": [{"client": 0}]}')
    with pytest.raises(UserError, match=r"client_scores.json: clients is .*, expected the scores of each client"):
        load_run(run)
