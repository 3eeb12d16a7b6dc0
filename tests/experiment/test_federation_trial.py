"""The files of a federation on one machine."""

from __future__ import annotations

import csv
from pathlib import Path

from fedllm.deployment.federation_folder import read_server_folder
from fedllm.deployment.site_settings import load_site
from fedllm.experiment.federation_trial import make_trial


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
