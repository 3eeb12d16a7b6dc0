"""Downloads in bfloat16: sites read what a simulation's clients read, and fewer bytes travel."""

from __future__ import annotations

import pytest
import torch
from small_clients import Federation, Point, quadratic, quadratic_batches, quadratic_federation, slope

from fedllm import load_algorithm
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import EXACT, DownloadsSettings
from fedllm.client import Broadcast, Client
from fedllm.common.errors import UserError
from fedllm.federation.rounds import run_round, start
from fedllm.federation.setup import Setup

HALF, ROUNDS = DownloadsSettings("bfloat16"), 4


def federation(name: str, downloads: DownloadsSettings) -> Federation:
    return quadratic_federation(load_algorithm(name, weights="uniform"), ROUNDS, downloads=downloads)


@pytest.mark.parametrize("name", ["fedavg", "fadamgc", "fedadamw", "feddyn"])
def test_sites_compute_what_a_simulation_computes(name: str) -> None:
    alg, info, server, clients = federation(name, HALF)
    setup = Setup(alg, quadratic(), info, Pipeline(), HALF)
    exact = Setup(alg, quadratic(), info)
    state, plain, everyone = start(setup), start(exact), list(range(info.num_clients))
    for t in range(ROUNDS):
        report, other = run_round(setup, state, everyone, everyone), run_round(exact, plain, everyone, everyone)
        travelled = 0
        for c, client in enumerate(clients):
            broadcast = Broadcast.from_bytes(server.broadcast(c).to_bytes())
            assert broadcast.x.dtype == torch.bfloat16
            travelled += sum(value.nbytes for value in (broadcast.x, *broadcast.server.values()))
            assert server.add(client.fit(broadcast, quadratic_batches(c, t), slope), client=c) is None
        server.aggregate()
        assert travelled == report.bytes_down == other.bytes_down // 4, "2 bytes in the place of float64's 8"
        assert report.bytes_up == other.bytes_up
    torch.testing.assert_close(server.x, state.x, rtol=1e-6, atol=1e-8)
    assert not torch.equal(state.x, plain.x)
    torch.testing.assert_close(state.x, plain.x, rtol=0.05, atol=0.02)


def test_the_servers_x_is_not_rounded() -> None:
    """A client starts from the rounded x, so that a round without a gradient moves nothing."""
    _, _, server, clients = federation("fedavg", HALF)
    before = server.x.clone()
    assert not torch.equal(before.bfloat16().double(), before)
    for c, client in enumerate(clients):
        upload = client.fit(server.broadcast(c), [0], lambda model, batch: (0 * model.x).sum())
        assert float(upload["d"].abs().max()) == 0
        server.add(upload, client=c)
    server.aggregate()
    assert torch.equal(server.x, before)


def test_a_client_that_reads_another_format_is_told_so() -> None:
    _, info, server, clients = federation("fadamgc", HALF)
    other = Client(Point(quadratic().initial()), clients[0].algorithm, info)
    with pytest.raises(UserError, match=r"downloads.bits: found 'bfloat16', expected 'float32'"):
        other.fit(server.broadcast(0), quadratic_batches(0, 0), slope)
    _, _, exact, _ = federation("fadamgc", EXACT)
    broadcast = exact.broadcast(0)
    unnamed = Broadcast(broadcast.round, broadcast.x, broadcast.server)
    with pytest.raises(UserError, match=r"tensor 'x': found \[6\] torch.float64, expected \[6\] torch.bfloat16"):
        clients[0].fit(unnamed, quadratic_batches(0, 0), slope)
