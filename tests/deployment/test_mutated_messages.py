"""10,000 messages changed at random: none raises what is not a UserError, none counts, none takes memory."""

from __future__ import annotations

import contextlib
import random
import resource
from typing import Any

import pytest
import torch
from mutations import mutated
from small_clients import DIM, K, batches, client_of, squared

from fedllm.client import Broadcast, Upload
from fedllm.common import tensor_file
from fedllm.common.errors import RunError, UserError
from fedllm.deployment import site_messages as said
from fedllm.server import Server

COUNT, PARTS = 4_000, 4
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(PARTS)]
MOST_MIB = 64


def peak() -> int:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def says(message: bytes, upload: Upload) -> bool:
    """Whether the change left what the message says, such as other spaces in a header."""
    try:
        found = Upload.from_bytes(message)
    except UserError:
        return False
    return found.head == upload.head and found.receipt == upload.receipt


@pytest.mark.parametrize("seed", SEEDS)
def test_no_mutated_upload_counts(seed: int) -> None:
    draw, site = random.Random(seed), client_of("fadamgc", weights="size")
    server = Server(site.algorithm, torch.zeros(DIM), site.info)
    upload = site.fit(server.broadcast(1), batches(), squared)
    data, before = upload.to_bytes(), peak()
    for _ in range(COUNT // PARTS):
        message = mutated(data, draw)
        if says(message, upload):
            continue
        why = server.add(message, client=1)
        assert why, message[:2000]
        assert len(why) <= 503
    assert peak() - before < MOST_MIB
    with pytest.raises(RunError, match="0 accepted uploads"):
        server.aggregate()
    assert server.add(data, client=1) is None
    torch.testing.assert_close(server.aggregate(), upload["d"][0])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_mutated_broadcast_harms_a_client(seed: int) -> None:
    """The client has sent an upload of this round, which the next broadcasts say did or did not count."""
    draw, site, twin = random.Random(seed), client_of("fadamgc"), client_of("fadamgc")
    server = Server(site.algorithm, torch.zeros(DIM), site.info)
    for each in (site, twin):
        sent = each.fit(server.broadcast(1), batches(), squared)
    asked = server.broadcast(1).to_bytes()
    assert server.add(sent, client=1) is None
    server.aggregate()
    counted = server.broadcast(1)
    before = peak()
    for data in (asked, counted.to_bytes()):
        for _ in range(COUNT // PARTS // 2):
            with contextlib.suppress(UserError):
                site.begin(Broadcast.from_bytes(mutated(data, draw)), K)
    assert peak() - before < MOST_MIB
    found, expected = (each.fit(counted, batches(3), squared) for each in (site, twin))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_message_is_refused_before_its_claims_are_read() -> None:
    """A header that claims 4 TiB over a few bytes."""
    header = b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    message = len(header).to_bytes(8, "little") + header
    before = peak()
    for cls in (Broadcast, Upload):
        with pytest.raises(UserError, match="expected a complete message or file written by fedllm"):
            cls.from_bytes(message)
    assert peak() - before < MOST_MIB


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"terms": [1]}, "broadcast terms: found list, expected dict"),
        ({"counted": [[]]}, "broadcast counted: found list, expected str"),
        ({"counted": 3}, "broadcast counted: found int, expected str"),
        ({"round": True}, "broadcast round: found bool, expected int"),
        ({"start": None}, "broadcast start: found NoneType, expected str"),
    ],
)
def test_a_head_of_other_types_is_named(head: dict, message: str) -> None:
    good = {"round": 0, "terms": {}, "counted": "", "start": ""}
    data = tensor_file.pack({**good, **head}, {"x": torch.zeros(4)})
    with pytest.raises(UserError, match=message):
        Broadcast.from_bytes(data)


def test_a_broadcast_that_does_not_fit_leaves_the_states_of_both_uploads() -> None:
    """A forged round would make the client forget the state of an upload that may still have counted."""
    site = client_of("fadamgc")
    server = Server(site.algorithm, torch.zeros(DIM), site.info)
    sent = site.fit(server.broadcast(1), batches(), squared)
    forged = Broadcast(4, torch.zeros(DIM + 1), {}, {}, "")
    with pytest.raises(UserError, match="tensor"):
        site.begin(forged, K)
    assert server.add(sent, client=1) is None
    server.aggregate()
    site.begin(server.broadcast(1), K)


# Announcements, orders and answers.


def messages() -> list[Any]:
    """One of each kind."""
    site, run = client_of("fadamgc"), "0f" * 16
    broadcast = Server(site.algorithm, torch.zeros(DIM), site.info).broadcast(1)
    upload = site.fit(broadcast, batches(), squared)
    return [
        said.Announcement(run, 1, 3, {"model": {"name": "tiny"}}, ("a", "b"), "0.1.0"),
        said.TrainOrder(run, broadcast, True),
        said.EvaluateOrder(run, 2, torch.zeros(DIM), torch.ones(2)),
        said.Joined("hospital", 20, 5, "cpu", {"fedllm": "0.1.0"}),
        said.TrainAnswer(upload, 0.5, 1.5),
        said.Scores(2, 5, {"accuracy": 0.5, "loss": None}),
        said.Status("hospital", "1", "waits"),
    ]


KINDS = ["Announcement", "TrainOrder", "EvaluateOrder", "Joined", "TrainAnswer", "Scores", "Status"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_mutated_message_raises_another_error(kind: str) -> None:
    draw = random.Random(kind)
    (message,) = [each for each in messages() if type(each).__name__ == kind]
    data, before, refused = message.to_bytes(), peak(), 0
    for _ in range(300):
        changed = mutated(data, draw)
        said.failure(changed)
        try:
            type(message).from_bytes(changed)
        except UserError:
            refused += 1
    assert refused > 200
    assert peak() - before < MOST_MIB


def test_every_kind_of_message_is_changed_here() -> None:
    kinds = {
        name
        for name, value in vars(said).items()
        if hasattr(value, "from_bytes") and getattr(value, "__module__", "") == said.__name__
    }
    assert kinds == {*KINDS}
    assert [type(each).__name__ for each in messages()] == KINDS
