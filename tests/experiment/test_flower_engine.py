"""run.engine: flower: the same numbers as our own engine, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from adapters import adapter, same_bits

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import RunError, UserError
from fedllm.deployment.link import Reply
from fedllm.experiment import flower_engine
from fedllm.experiment.flower_client import _job, read_answer, train_order
from fedllm.experiment.job import Job
from fedllm.experiment.run import dry_run

OWN = ["federation.rounds=2", "run.stacked_clients=1", "run.precision=float32", "run.device=cpu", "run.threads=1"]
OWN += ["run.trackers=[]", "run.checkpoint_every=1"]
FLOWER = [*OWN, "run.engine=flower"]


class HereClients:
    """Flower's clients without Flower: the same orders and answers, in this process."""

    def __init__(self, job: Job, log: Path) -> None:
        self.sections = flower_engine.json.dumps(flower_engine._client_sections(job.recipe, 1))

    def ask(self, clients: Sequence[int], coming: Sequence[int], order: Any, done: Any) -> dict[int, tuple[Any, ...]]:
        found = {}
        for client in clients:
            try:
                found[client] = read_answer(train_order(self.sections, client, order(client)))
            except UserError as error:
                raise RunError(f"client {client}: {error}") from error
            done(client)
        return found

    def close(self) -> None:
        _job.cache_clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_engine, "_Clients", HereClients)
    monkeypatch.setattr(flower_engine, "simulation_python", lambda: Path("python"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["algorithm.name=fadamgc"], ["algorithm.name=scaffold", "deployment.keep_local=head"]]
)
def test_orders_and_answers_carry_all_that_a_client_needs(
    tiny: Path, tmp_path: Path, here: None, overrides: list[str]
) -> None:
    own = run_recipe(tiny / "recipe.yaml", [*OWN, *overrides], tmp_path / "own")
    found = run_recipe(tiny / "recipe.yaml", [*FLOWER, *overrides], tmp_path / "flower")
    assert same_bits(tmp_path / "own", tmp_path / "flower")
    kept = ("train_loss", "accuracy", "bytes_up", "bytes_down", "clients", "update_norm", "second_moment_spread")
    assert [[line.get(name) for name in kept] for line in found.metrics] == [
        [line.get(name) for name in kept] for line in own.metrics
    ]


@pytest.mark.slow
def test_a_run_goes_on_with_the_other_engine(tiny: Path, tmp_path: Path, here: None) -> None:
    whole = [*OWN, "federation.rounds=3", "algorithm={name: fedadamw, lr: 1.0e-2, schedule: constant}"]
    run_recipe(tiny / "recipe.yaml", whole, tmp_path / "whole")
    for extra in (["federation.rounds=1"], ["run.engine=flower"]):
        run_recipe(tiny / "recipe.yaml", [*whole, *extra], tmp_path / "parts")
    assert same_bits(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_other_data_in_rays_process_ends_the_run(
    tiny: Path, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_engine, "inputs_of", lambda job: {"training": "other"})
    with pytest.raises(RunError, match=r"client \d+: Ray's process read other data .* differs in: training"):
        run_recipe(tiny / "recipe.yaml", FLOWER, tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.device=cuda"], "run.device: found cuda"),
        (["lora.train=turns"], "lora.train: found turns"),
        (["algorithm.tracking_init=gradient"], "algorithm.tracking_init: found gradient"),
        (
            ["privacy={level: sample, noise: 1.0, delta: 1.0e-4, clip: 0.5}", "local={steps: 2, batch_size: 8}",
             "algorithm={name: localadamw, lr: 0.01}"],
            "privacy.level: found sample",
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_key(
    tiny: Path, here: None, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr("fedllm.experiment.training.build_together", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(UserError, match=message):
        dry_run(load_recipe(tiny / "recipe.yaml", [*FLOWER, *overrides]))


def test_without_flower_the_error_names_the_command(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDLLM_FLOWER_SIMULATION", str(tmp_path / "python"))
    with pytest.raises(UserError, match="run: make flower-simulation"):
        dry_run(load_recipe(tiny / "recipe.yaml", FLOWER))


class CountingLink:
    """Answers the request that has waited longest. most: the largest number of requests that waited."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.waiting: list[int] = []
        self.most = 0

    def send(self, site: int, kind: str, body: bytes, seconds: float) -> str:
        self.sent.append(site)
        self.waiting.append(site)
        self.most = max(self.most, len(self.waiting))
        return str(site)

    def replies(self) -> list[Reply]:
        site = self.waiting.pop(0)
        return [Reply(str(site), site, b"%d" % site)]


@pytest.mark.parametrize("stacked", [1, 3])
def test_clients_are_asked_ahead_so_that_no_process_waits(monkeypatch: pytest.MonkeyPatch, stacked: int) -> None:
    monkeypatch.setattr(flower_engine, "read_answer", lambda body: (int(body),))
    clients = object.__new__(flower_engine._Clients)
    link = CountingLink()
    clients._link, clients._ahead, clients._seconds = link, 2, 1.0  # type: ignore[assignment]
    clients._asked, clients._found = {}, {}
    order = [7, 3, 5, 0, 6, 1, 4, 2]
    seen: list[int] = []
    for place in range(0, len(order), stacked):
        some = order[place : place + stacked]
        found = clients.ask(some, order[place + stacked :], lambda client: b"", seen.append)
        assert found == {client: (client,) for client in some}
    assert link.sent == seen == order
    assert link.most == stacked + 2
    assert not clients._asked
    assert not clients._found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_flower_on_ray_equals_our_engine(tiny: Path, tmp_path: Path) -> None:
    try:
        flower_engine.simulation_python()
    except UserError as error:
        pytest.skip(str(error))
    run_recipe(tiny / "recipe.yaml", OWN, tmp_path / "own")
    run_recipe(tiny / "recipe.yaml", FLOWER, tmp_path / "flower")
    own, found = adapter(tmp_path / "own"), adapter(tmp_path / "flower")
    assert max(float((found[name] - value).abs().max()) for name, value in own.items()) < 1e-6
    assert "ClientAppActor" in (tmp_path / "flower" / "flower.log").read_text()
