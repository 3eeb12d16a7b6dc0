"""Clipped and rounded uploads between Client and Server: the simulation's numbers, the counted bytes, honest state."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_clients import Federation, K, Point, quadratic, quadratic_batches, quadratic_federation, slope
from torch import Tensor

from fedllm import load_algorithm
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import UploadsSettings
from fedllm.client import Broadcast, Client, Upload
from fedllm.common.errors import UserError
from fedllm.federation.rounds import run_round, start
from fedllm.federation.setup import Setup

ALL = [
    UploadsSettings(clip=0.05),
    UploadsSettings(bits="bfloat16"),
    UploadsSettings(bits="int8"),
    UploadsSettings(clip=0.05, bits="int4"),
]
ROUNDS = 5


def named(settings: UploadsSettings) -> str:
    return f"{settings.bits}{'' if settings.clip is None else '-clipped'}"


def federation(name: str, uploads: UploadsSettings) -> Federation:
    return quadratic_federation(load_algorithm(name), ROUNDS, uploads=uploads)


@pytest.mark.parametrize("uploads", ALL, ids=named)
@pytest.mark.parametrize("name", ["fadamgc", "scaffold", "fedadamw", "feddyn", "qfedavg"])
def test_sites_compute_what_a_simulation_computes(name: str, uploads: UploadsSettings) -> None:
    alg, info, server, clients = federation(name, uploads)
    problem = quadratic()
    setup = Setup(alg, problem, info, Pipeline.of(uploads, alg, seed=0))
    state, everyone = start(setup), list(range(problem.num_clients))
    for t in range(ROUNDS):
        report = run_round(setup, state, everyone, everyone)
        travelled = 0
        for c, client in enumerate(clients):
            broadcast = Broadcast.from_bytes(server.broadcast(c).to_bytes())
            upload = Upload.from_bytes(client.fit(broadcast, quadratic_batches(c, t), slope).to_bytes())
            travelled += sum(value.nbytes for value in upload.tensors.values())
            assert server.add(upload, client=c) is None
        server.aggregate()
        assert travelled == report.bytes_up
    torch.testing.assert_close(server.x, state.x, rtol=1e-6, atol=1e-8)
    for tracked in alg.tracked_uploads():
        mean = torch.stack([client.state[tracked][0] for client in clients]).double().mean(0)
        torch.testing.assert_close(server.state[tracked].double(), mean, rtol=1e-5, atol=1e-9)


def test_a_lost_upload_takes_what_was_kept_with_it() -> None:
    uploads = UploadsSettings(bits="int4")
    alg, _, server, clients = federation("scaffold", uploads)
    draw = random.Random(0)
    for t in range(ROUNDS):
        for c, client in enumerate(clients):
            upload = client.fit(server.broadcast(c), quadratic_batches(c, t), slope)
            if c == 0 or draw.random() > 0.3:  # else it is lost on the way
                assert server.add(upload, client=c) is None
        server.aggregate()
    for c, client in enumerate(clients):  # each restores the state that belongs to its last counted upload
        if server.round < server.info.total:
            client.begin(server.broadcast(c), K)
    kept = [client._ledger for client in clients]
    states = [
        ({**ledger._others, ledger._receipt: ledger.state})[server.counted.get(c, "")] for c, ledger in enumerate(kept)
    ]
    (name,) = alg.tracked_uploads()
    mean: Tensor = torch.stack([state[name][0] for state in states]).double().mean(0)
    torch.testing.assert_close(server.state[name].double(), mean, rtol=1e-5, atol=1e-9)


def test_a_client_that_does_not_clip_is_clipped_by_the_server() -> None:
    uploads = UploadsSettings(clip=0.05)
    alg, info, server, _ = federation("fedavg", uploads)
    before = server.x.clone()
    liar = Upload({"d": torch.full((1, len(before)), 1e6, dtype=before.dtype)}, 0, K, 0.1 * K, 1, True)
    assert server.add(liar, client=0) is None
    server.aggregate()
    assert float((server.x - before).norm()) <= 0.05 * (1 + 1e-6)
    assert info.num_clients > 1
    assert alg.server_lr == 1.0


def test_a_client_that_clips_otherwise_is_told_so() -> None:
    _, info, server, clients = federation("fadamgc", UploadsSettings(clip=1.0))
    for uploads, message in (
        (UploadsSettings(), r"uploads.clip: found 1.0, expected None"),
        (UploadsSettings(clip=0.5), r"uploads.clip: found 1.0, expected 0.5"),
        (UploadsSettings(clip=1.0, bits="int8"), r"uploads.bits: found 'float32', expected 'int8'"),
    ):
        other = Client(Point(quadratic().initial()), clients[0].algorithm, info, uploads=uploads)
        with pytest.raises(UserError, match=message):
            other.fit(server.broadcast(0), quadratic_batches(0, 0), slope)


@pytest.mark.parametrize("bits", ["bfloat16", "int8", "int4"])
def test_tensors_of_another_format_are_rejected(bits: Any) -> None:
    _, _, server, clients = federation("fadamgc", UploadsSettings(bits=bits))
    upload = clients[0].fit(server.broadcast(0), quadratic_batches(0, 0), slope)
    broken = {
        "float32": {"d": torch.zeros(1, len(server.x)), "y": torch.zeros(1, len(server.x))},
        "without a scale": {name: value for name, value in upload.items() if "scale" not in name and name != "y"},
        "too long": {name: torch.cat([value, value], dim=1) for name, value in upload.items()},
    }
    for tensors in broken.values():
        why = server.add(replace(upload, tensors=tensors), client=0)
        assert why is not None
        assert "expected" in why
    if bits != "bfloat16":
        scales = {name: value * torch.nan if name.endswith("scale") else value for name, value in upload.items()}
        assert "not finite" in str(server.add(replace(upload, tensors=scales), client=0))
    assert server.add(upload, client=0) is None


def test_mutated_encoded_uploads_raise_nothing() -> None:
    _, _, server, clients = federation("fadamgc", UploadsSettings(bits="int4", clip=1.0))
    whole = clients[0].fit(server.broadcast(0), quadratic_batches(0, 0), slope).to_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        refused += server.add(bytes(data), client=0) is not None
        server._open()
    assert refused > 500


def test_a_saved_client_goes_on(tmp_path: Path) -> None:
    uploads = UploadsSettings(bits="int8")
    alg, info, server, clients = federation("fadamgc", uploads)
    for t in range(2):
        for c, client in enumerate(clients):
            assert server.add(client.fit(server.broadcast(c), quadratic_batches(c, t), slope), client=c) is None
        server.aggregate()
    clients[0].save(tmp_path / "c.safetensors")
    again = Client(Point(quadratic().initial()), alg, info, uploads=uploads, number=0)
    again.load(tmp_path / "c.safetensors")
    one, other = (c.fit(server.broadcast(0), quadratic_batches(0, 2), slope) for c in (clients[0], again))
    assert one.receipt == other.receipt
