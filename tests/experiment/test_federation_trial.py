"""The files of a federation on one machine."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedllm.deployment.federation_folder import read_server_folder
from fedllm.deployment.site_settings import load_site
from fedllm.experiment import federation_trial
from fedllm.experiment.federation_trial import make_trial
from fedllm.experiment.site_run import site_recipe


def rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def test_the_articles_are_shared_out_by_the_seed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_trial(tmp_path / name, 3)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.csv"))
    assert len(files) == 7
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    found = [row for file in files for row in rows(tmp_path / "one" / file)]
    assert len(found) == 2225
    labels = {label for _, label in found}
    assert labels == {"business", "entertainment", "politics", "sports", "tech"}
    own = [[label for _, label in rows(tmp_path / "one" / f"site-{number}" / "train.csv")] for number in range(3)]
    assert len({max(labels, key=of_site.count) for of_site in own}) > 1  # each with its own mix
    assert len(read_server_folder(tmp_path / "one" / "server").sites) == 3
    assert load_site(tmp_path / "one" / "site-2" / "site.yaml").name == "site-2"


def test_a_trial_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    make_trial(tmp_path / "one", 2)
    before = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    make_trial(tmp_path / "one", 2)
    assert {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()} == before


def test_the_sites_of_a_trial_share_the_machines_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation_trial, "usable_cores", lambda: 7)
    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    with federation_trial._processes(
        dict.fromkeys(("server", "site-0", "site-1", "site-2"), command), tmp_path
    ) as found:
        assert [process.communicate()[0] for process in found.values()] == ["2\n"] * 4


def test_a_site_takes_its_threads_from_its_file_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trial(tmp_path, 2)
    settings = load_site(tmp_path / "site-0" / "site.yaml")
    recipe = {"algorithm": {"name": "fedavg", "lr": 0.1}, "data": {"train": "a.csv"}, "local": {"steps": 1}}
    told = SimpleNamespace(recipe=recipe, sites=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as torch reads it when a process starts
    assert site_recipe(told, settings).run.threads == 3  # type: ignore[arg-type]
    assert site_recipe(told, replace(settings, threads=2)).run.threads == 2  # type: ignore[arg-type]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert site_recipe(told, settings).run.threads is None  # type: ignore[arg-type]
