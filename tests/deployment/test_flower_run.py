"""A whole run over Flower, whose processes are killed in the middle of rounds, has the numbers of the simulation."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path

import pytest
from federations import numbers, recipe_of, simulated, three_sites
from flower_federations import Federation, kill
from safetensors.torch import load_file

from fedllm.deployment.site_settings import Policy
from fedllm.experiment.serve import serve
from fedllm.experiment.site import SiteWorker, open_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = ("a", "b", "c")
OVERRIDES = [
    "partition={scheme: by_column, column: site, clients: 3}", "local={steps: 3, batch_size: 8}", "run.trackers=[]",
    "federation={rounds: 4, clients_per_round: 3, tracked_per_round: 3, min_clients: 3}", "run.device=cpu",
    "data.classes=['0', '1']", "run.stacked_clients=1",
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fadamgc", pytest.param("localadamw", marks=pytest.mark.long)])
def test_a_run_whose_flower_processes_are_killed_equals_the_simulation(
    tiny: Path, tmp_path: Path, algorithm: str
) -> None:
    files = sorted((three_sites(tiny, tmp_path) / "sites").iterdir())
    overrides = [*OVERRIDES, f"algorithm.name={algorithm}"]
    expected = simulated(tmp_path / "recipe.yaml", overrides, tmp_path / "simulated")

    kills = Kills()
    federation = Federation(tmp_path / "flower", kills.handle, NAMES)
    kills.federation = federation
    for name, file in zip(NAMES, files, strict=True):
        shutil.copyfile(file, tmp_path / "flower" / name / "train.csv")
        kills.workers[name] = open_site(
            dataclasses.replace(federation.settings[name], threads=1, device="cpu", allow=Policy(min_sites=None))
        )
    try:
        patient = "deployment={deadline: 400, ask_again: 120, patience: 400}"
        recipe = recipe_of(tmp_path / "recipe.yaml", [*overrides, patient], tmp_path / "deployed")
        found = serve(recipe, federation.link)
    finally:
        federation.close()

    assert kills.done == ["server app", "superlink", "node"]
    ours, theirs = (load_file(each.folder / "adapter" / "adapter_model.safetensors") for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().max()) <= 1e-6
    assert len(numbers(found.metrics)) == 4
    assert [line["missing"] for line in found.metrics] == [[], [], [], []]


class Kills:
    """Sites that compute, and what kills one of Flower's processes in each round, once its work has begun."""

    def __init__(self) -> None:
        self.federation: Federation | None = None
        self.workers: dict[str, SiteWorker] = {}
        self.done: list[str] = []
        self._orders = 0
        self._lock = threading.Lock()

    def handle(self, name: str, kind: str, body: bytes) -> bytes:
        if kind == "train":
            with self._lock:
                self._kill(name)
        return self.workers[name].handle(kind, body)

    def _kill(self, name: str) -> None:
        federation = self.federation
        self._orders += 1
        if federation is None:
            return
        if self._orders == 2:
            self.done.append("server app")
            kill(federation.link.relay_process)
        elif self._orders == 8:
            assert federation.server.superlink is not None
            self.done.append("superlink")
            kill(federation.server.superlink.pid)
        elif self._orders == 14:
            self.done.append("node")
            kill(federation.sites.nodes[name].pid)
