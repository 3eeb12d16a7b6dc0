"""Deployed runs in which sites, messages, disks and the server fail. Each ends with the numbers it should."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import server_process
import torch
import yaml
from federations import ThreadLink, deployed, recipe_of, settings, simulated, three_sites
from safetensors.torch import load_file
from site_processes import FULL_DISK, MOMENTS, SiteProcesses

from fedllm.common.errors import RunError
from fedllm.deployment import ledger
from fedllm.deployment.local import LocalLink
from fedllm.deployment.site_messages import TrainAnswer
from fedllm.deployment.site_settings import Policy
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.run import RunResult
from fedllm.experiment.serve import serve

OVERRIDES = [
    "partition={scheme: by_column, column: site, clients: 3}", "local={steps: 2, batch_size: 8}", "run.trackers=[]",
    "federation={rounds: 3, clients_per_round: 3, tracked_per_round: 3, min_clients: 2}", "run.device=cpu",
    "data.classes=['0', '1']", "run.stacked_clients=1", "eval.every=10",
]  # fmt: skip
SOON = "deployment={sites: 3, start: 2, deadline: 1.5, patience: 20}"


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_sites(tiny, tmp_path_factory.mktemp("three"))


def paths(three: Path) -> list[Path]:
    return sorted((three / "sites").iterdir())


def link_of(three: Path, folder: Path) -> ThreadLink:
    return ThreadLink([settings(folder, path, path.stem) for path in paths(three)])


def trained(result: RunResult) -> dict[str, torch.Tensor]:
    return load_file(result.folder / "adapter" / "adapter_model.safetensors")


def apart(one: RunResult, other: RunResult) -> float:
    """The largest difference between what two runs trained."""
    ours, theirs = trained(one), trained(other)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture
def processes(three: Path, tmp_path: Path) -> Iterator[SiteProcesses]:
    kills = {round: (round % 3, moment) for round, moment in enumerate(MOMENTS)}
    made = SiteProcesses(tmp_path / "sites", paths(three), kills)
    yield made
    made.close()


@pytest.mark.slow
def test_sites_killed_at_every_moment(three: Path, tmp_path: Path, processes: SiteProcesses) -> None:
    """Seven rounds, in each of which but the last one site is killed with -9, and clocks that are days apart."""
    overrides = [*OVERRIDES, "federation.rounds=7", "deployment={sites: 3, deadline: 300, patience: 300}"]
    recipe = recipe_of(three / "recipe.yaml", overrides, tmp_path / "deployed")
    found = serve(recipe, LocalLink(processes.sockets))
    processes.wait_for(3 + len(MOMENTS))
    assert processes.starts == 3 + len(MOMENTS)
    assert apart(found, simulated(three / "recipe.yaml", overrides, tmp_path / "simulated")) <= 1e-6
    assert all(line["missing"] == [] and line["rejected"] == {} for line in found.metrics)


@pytest.mark.slow
def test_a_server_killed_at_every_moment(three: Path, tmp_path: Path) -> None:
    """Five rounds, in each of which but the last one the server is killed with -9 and started again."""
    sites = SiteProcesses(tmp_path / "sites", paths(three))
    overrides = [*OVERRIDES, "federation.rounds=5", "deployment={sites: 3, deadline: 300, patience: 300}"]
    recipe, plan = tmp_path / "recipe.yaml", tmp_path / "plan.yaml"
    recipe.write_text(recipe_of(three / "recipe.yaml", overrides, tmp_path / "deployed").yaml())
    plan.write_text(yaml.safe_dump(dict(enumerate(server_process.MOMENTS))))
    try:
        words = (str(recipe), str(plan), str(sites.folder), "3")
        done = forked.run(server_process.__file__, *words, folder=tmp_path, timeout=500)
    finally:
        sites.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(1 + len(server_process.MOMENTS))
    assert sites.starts == 3
    found = RunResult(tmp_path / "deployed", {}, [])
    assert apart(found, simulated(three / "recipe.yaml", overrides, tmp_path / "simulated")) <= 1e-6
    lines = [json.loads(line) for line in (found.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["missing"] == [] and line["rejected"] == {} for line in lines)


@pytest.mark.slow
def test_a_site_is_absent_joins_in_round_five_and_is_lost_again(three: Path, tmp_path: Path) -> None:
    link, counted = link_of(three, tmp_path), list[int]()
    link.end(2)

    def joins(site: int, kind: str, answer: bytes) -> bytes:
        done = link.asked.count((0, "train"))
        if site == 0 and kind == "train" and done == 5:
            link.restart(2)
        if site == 2 and kind == "train":
            counted.append(done)
        if site == 0 and kind == "train" and done == 8:
            link.end(2)
        return answer

    link.spoil = joins
    found = deployed(three / "recipe.yaml", [*OVERRIDES, SOON, "federation.rounds=9"], tmp_path / "deployed", link)
    missing = [line["missing"] for line in found.metrics]
    assert missing[:4] == [[2]] * 4
    assert counted[0] in (5, 6, 7)  # it must read its data and model first, in round 5
    assert [] in missing[4:8]
    assert missing[8] == [2]


def spoilt(answer: bytes, how: str) -> bytes:
    """The bytes of an answer with another upload."""
    if how == "garbage":
        return b"\x00" * 300
    if how == "long":
        return answer * 100
    found = TrainAnswer.from_bytes(answer)
    tensors = {name: value.clone() for name, value in found.upload.tensors.items()}
    if how == "nan":
        tensors["d"][0, 5] = torch.nan
    if how == "model":
        tensors["d"] = tensors["d"][:, 1:].contiguous()
    upload = replace(found.upload, tensors=tensors, **({"start": "0" * 64} if how == "run" else {}))
    return replace(found, upload=upload).to_bytes()


@pytest.mark.slow
def test_what_is_no_upload_of_the_round_does_not_count(three: Path, tmp_path: Path) -> None:
    """Site 1 sends something else in each of five rounds: the run is that of the two others."""
    ways = {
        "garbage": "found 300 bytes, expected a complete message", "nan": "1 of", "model": "tensor 'd': found",
        "run": "it began with another x", "long": "expected at most",
    }  # fmt: skip
    overrides = [*OVERRIDES, SOON, "federation.rounds=5"]
    link, told = link_of(three, tmp_path / "one"), iter(ways)
    link.spoil = lambda site, kind, answer: spoilt(answer, next(told)) if (site, kind) == (1, "train") else answer
    found = deployed(three / "recipe.yaml", overrides, tmp_path / "spoilt", link)
    for line, why in zip(found.metrics, ways.values(), strict=True):
        assert list(line["rejected"]) == ["1"]
        assert why in line["rejected"]["1"]
    absent = link_of(three, tmp_path / "other")
    absent.end(1)
    assert apart(found, deployed(three / "recipe.yaml", overrides, tmp_path / "absent", absent)) == 0


@pytest.mark.slow
def test_a_full_disk_at_a_site_costs_a_round(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upload of round 2 is never sent, and it goes on from its state before that."""
    link, write = link_of(three, tmp_path), ledger.tensor_file.write
    monkeypatch.setattr(ledger.tensor_file, "write", lambda path, data: full(path) or write(path, data))

    def full(path: Path) -> None:
        if "site1" in str(path) and link.asked.count((1, "train")) == 2:
            raise RunError(f"{path} could not be written: [Errno 28] No space left on device")

    found = deployed(three / "recipe.yaml", [*OVERRIDES, SOON], tmp_path / "deployed", link)
    assert [list(line["rejected"]) for line in found.metrics] == [[], ["1"], []]
    assert "No space left" in found.metrics[1]["rejected"]["1"]


@pytest.mark.slow
def test_a_full_disk_at_a_site_of_its_own_process(three: Path, tmp_path: Path) -> None:
    """In round 2 site 1 can write no file above 1000 bytes. Its process stays, and takes part in round 3."""
    sites = SiteProcesses(tmp_path / "sites", paths(three), {1: (1, FULL_DISK)})
    overrides = [*OVERRIDES, "deployment={sites: 3, deadline: 300, patience: 300}"]
    try:
        recipe = recipe_of(three / "recipe.yaml", overrides, tmp_path / "deployed")
        found = serve(recipe, LocalLink(sites.sockets))
    finally:
        sites.close()
    assert [list(line["rejected"]) for line in found.metrics] == [[], ["1"], []]
    assert "File too large" in found.metrics[1]["rejected"]["1"]
    assert sites.starts == 3


@pytest.mark.slow
def test_a_full_disk_at_the_server_ends_the_run_which_goes_on(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, rounds = Checkpoints.save, []

    def full(self: Checkpoints, state: object, *others: object) -> Path:
        rounds.append(state)
        if len(rounds) == 2:
            raise RunError("the checkpoint of round 2 could not be written: no space left")
        return save(self, state, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(RunError, match=r"the checkpoint of round 2.*The checkpoint of round 1 is intact"):
        deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link_of(three, tmp_path))
    found = deployed(three / "recipe.yaml", OVERRIDES, tmp_path / "deployed", link_of(three, tmp_path))
    assert apart(found, simulated(three / "recipe.yaml", OVERRIDES, tmp_path / "simulated")) <= 1e-6


@pytest.mark.slow
def test_too_few_sites_end_the_run_with_their_reasons(three: Path, tmp_path: Path) -> None:
    link = link_of(three, tmp_path)
    link.end(0)
    link.settings[1] = settings(tmp_path, paths(three)[1], "site1", allow=Policy(algorithms=["fedavg"]))
    link.restart(1)
    began = time.monotonic()
    told = r"waited 2 s .* for 3 sites(.|\n)*site 0: was not reached(.|\n)*allow.algorithms"
    with pytest.raises(RunError, match=told):
        deployed(three / "recipe.yaml", [*OVERRIDES, "deployment={sites: 3, patience: 2}"], tmp_path / "deployed", link)
    assert time.monotonic() - began < 60
