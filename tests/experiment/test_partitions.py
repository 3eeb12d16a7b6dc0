"""Runs on clients of every kind: how the samples were split depends on samples and seed alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import launch

from fedllm import run_recipe
from fedllm.cli.commands import main

CLUSTERS = ["partition={scheme: dirichlet_clusters, clusters: 3, alpha: 0.5}", "federation.rounds=1", "run.trackers=[]"]


@pytest.mark.slow
def test_two_processes_find_the_clusters_of_one(tiny: Path, tmp_path: Path) -> None:
    """Its digest is in partition.json."""
    one = run_recipe(tiny / "recipe.yaml", CLUSTERS, tmp_path / "one").folder
    done = launch("-m", "fedllm", "run", str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'two'}", *CLUSTERS)
    assert done.returncode == 0, done.stderr
    parts = [(folder / "partition.json").read_text() for folder in (one, tmp_path / "two")]
    assert parts[0] == parts[1]
    file = tmp_path / "p.json"
    assert main(["partition", str(tiny / "recipe.yaml"), *CLUSTERS, "--out", str(file)]) == 0
    assert json.loads(file.read_text())["digest"] == json.loads(parts[0])["data"]["partition"]


@pytest.mark.slow
def test_a_run_on_natural_clients_within_limits_says_what_it_leaves_out(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (tiny / "train.csv").read_text().splitlines()
    for name, some in (("rome", rows[1:40]), ("oslo", rows[40:60]), ("bonn", rows[60:62])):
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{name}.csv").write_text("\n".join([rows[0], *some, ""]))
    words = [
        f"data.train={tmp_path / 'sites'}",
        "federation={clients_per_round: 2, tracked_per_round: 2, rounds: 1}",
        "run.trackers=[]",
    ]
    limits = "partition={scheme: by_column, column: client, clients: null, min_size: 3, drop_small: true, max_size: 30}"
    folder = run_recipe(tiny / "recipe.yaml", [*words, limits], tmp_path / "run").folder
    said = " ".join(capsys.readouterr().out.split())
    assert "partition.drop_small leaves out 1 of 3 clients, which have 2 samples: 'bonn' (2)" in said
    assert "partition.max_size leaves out 9 of 61 samples, of 1 of 3 clients: 'rome' (9)" in said
    found = json.loads((folder / "partition.json").read_text())
    assert (found["names"], found["sizes"]) == (["oslo", "rome"], [20, 30])
