"""A site's process and orders changed at random: each is answered, nothing of the site's state is lost."""

from __future__ import annotations

import copy
import random
import resource
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import write_rows
from federations import settings
from mutations import BAD_VALUES, mutated

from fedllm.config.recipe import load_recipe
from fedllm.deployment.server import Server
from fedllm.deployment.site_messages import (
    Announcement,
    EvaluateOrder,
    Joined,
    Scores,
    TrainAnswer,
    TrainOrder,
    failure,
)
from fedllm.experiment.site import SiteWorker, open_site

pytestmark = pytest.mark.slow
RUN = "0f" * 16
OVERRIDES = [
    "local={steps: 2, batch_size: 4}", "data.classes=['0', '1']", "partition.clients=3", "deployment.sites=3",
    "federation={rounds: 3, clients_per_round: 3}", "run.trackers=[]",
]  # fmt: skip
MOST_MIB = 300


@pytest.fixture
def told(tiny: Path) -> Announcement:
    found = load_recipe(tiny / "recipe.yaml", OVERRIDES).sections()
    sections = {name: keys or None for name, keys in found.items()}  # as the server announces it
    return Announcement(RUN, 1, 3, sections, ("0", "1"), version("fedllm"))


@pytest.fixture
def worker(tiny: Path, tmp_path: Path) -> SiteWorker:
    train = write_rows(tmp_path / "train.csv", 12, seed=0)
    return open_site(settings(tmp_path, train, "site", validation=write_rows(tmp_path / "validation.csv", 4, seed=1)))


def server_of(worker: SiteWorker) -> Server:
    """Of the run that the worker has joined."""
    setup = worker._run._setup  # type: ignore[union-attr]
    return Server(setup.algorithm, setup.problem.initial(), setup.info)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.parametrize("seed", range(3))
def test_every_mutated_order_is_answered(worker: SiteWorker, told: Announcement, seed: int) -> None:
    draw = random.Random(seed)
    assert Joined.from_bytes(worker.handle("announce", told.to_bytes())).samples == 12
    server = server_of(worker)
    order = TrainOrder(RUN, server.broadcast(1), True)
    first = worker.handle("train", order.to_bytes())
    upload = TrainAnswer.from_bytes(first).upload
    assert server.add(upload, client=1) is None
    server.aggregate()
    counted = TrainOrder(RUN, server.broadcast(1), True)
    before = peak()
    for _ in range(250):
        kind, message = draw.choice([("train", counted), ("evaluate", EvaluateOrder(RUN, 1, server.x))])
        answer = worker.handle(kind, mutated(message.to_bytes(), draw))
        if (said := failure(answer)) is None:
            (TrainAnswer if kind == "train" else Scores).from_bytes(answer)
        else:
            assert said.whose in ("site", "server")
            assert said.error
    assert failure(worker.handle("rm", b"")) is not None
    assert peak() - before < MOST_MIB
    found = TrainAnswer.from_bytes(worker.handle("train", counted.to_bytes())).upload
    assert server.add(found, client=1) is None


def test_every_changed_recipe_is_answered(worker: SiteWorker, told: Announcement) -> None:
    """One key of the announced recipe is changed: what cannot be is refused, and the next announcement works."""
    draw, before = random.Random(0), peak()
    refused = 0
    for _ in range(60):
        sections = copy.deepcopy(told.recipe)
        name = draw.choice([each for each in sections if sections[each]])
        sections[name][draw.choice(list(sections[name]))] = draw.choice(BAD_VALUES)
        changed = Announcement(RUN, 1, 3, sections, told.classes, told.version)
        answer = worker.handle("announce", changed.to_bytes())
        said = failure(answer)
        refused += said is not None
        assert said is not None or Joined.from_bytes(answer).samples == 12
    assert refused > 20
    assert peak() - before < MOST_MIB
    assert Joined.from_bytes(worker.handle("announce", told.to_bytes())).samples == 12


@pytest.mark.parametrize("sites", [2**53 - 1, 100_001])
def test_a_federation_of_very_many_sites_takes_no_memory(worker: SiteWorker, told: Announcement, sites: int) -> None:
    before = peak()
    many = Announcement(RUN, 1, sites, told.recipe, told.classes, told.version)
    assert failure(worker.handle("announce", many.to_bytes())) is not None
    assert peak() - before < MOST_MIB


def test_an_answer_is_finite(worker: SiteWorker, told: Announcement) -> None:
    """x at the edge of float32: the site refuses to send what is not finite, and says so."""
    worker.handle("announce", told.to_bytes())
    server = server_of(worker)
    server.x = torch.full_like(server.x, 3e38)
    said = failure(worker.handle("train", TrainOrder(RUN, server.broadcast(1), True).to_bytes()))
    assert said is not None
    assert "not finite" in said.error
