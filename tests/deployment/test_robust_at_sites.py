"""Robust rules at a server of real sites: the simulation's numbers, and a site that is left out goes back by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from small_clients import Federation, K, quadratic, quadratic_batches, quadratic_federation, slope

from fedllm import load_algorithm
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import PLAIN, RobustSettings
from fedllm.client import Client, Upload
from fedllm.common.errors import RunError, UserError
from fedllm.deployment.asking import Heard
from fedllm.deployment.rounds import deployed_round
from fedllm.deployment.site_messages import TrainAnswer, TrainOrder
from fedllm.federation.rounds import run_round, start
from fedllm.federation.setup import Setup

RUN, ROUNDS, LIAR = "0" * 32, 4, 3
RULES = [
    RobustSettings("median", 1),
    RobustSettings("trimmed_mean", 1),
    RobustSettings("nnm_trimmed_mean", 1),
    RobustSettings("multi_krum", 1),
    RobustSettings(norm=3.0),
]


def federation(name: str, robust: RobustSettings) -> Federation:
    return quadratic_federation(load_algorithm(name, weights="uniform"), ROUNDS, robust)


def lie(upload: Upload) -> Upload:
    return Upload({name: -50 * value for name, value in upload.items()}, **upload.head)


@pytest.mark.parametrize("robust", RULES, ids=lambda robust: robust.rule)
def test_sites_compute_what_a_simulation_computes(robust: RobustSettings) -> None:
    """The uploads come in another order every round, which changes no bit."""
    alg, info, server, clients = federation("localadamw", robust)
    setup = Setup(alg, quadratic(), info, Pipeline.of(PLAIN, alg, 0, robust))
    state, everyone = start(setup), list(range(info.num_clients))
    other = federation("localadamw", robust)[2]
    for t in range(ROUNDS):
        report = run_round(setup, state, everyone, everyone)
        uploads = [client.fit(server.broadcast(c), quadratic_batches(c, t), slope) for c, client in enumerate(clients)]
        for place in range(info.num_clients):
            assert server.add(uploads[place], client=place) is None
            back = (place + t + 1) % info.num_clients
            assert other.add(uploads[back], client=back) is None
        assert server.left_out() == report.rejected
        server.aggregate()
        assert torch.equal(other.aggregate(), server.x)
    torch.testing.assert_close(server.x, state.x, rtol=1e-9, atol=1e-12)


class Sites:
    """Sites that answer at once; LIAR lies."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients

    def ask(
        self,
        kind: str,
        sites: Sequence[int],
        order: Callable[[int], bytes],
        take: Callable[[int, bytes], str | None],
        least: int,
    ) -> Heard:
        heard = Heard()
        for site in sites:
            broadcast = TrainOrder.from_bytes(order(site)).broadcast
            upload = self.clients[site].fit(broadcast, quadratic_batches(site, broadcast.round), slope)
            answer = TrainAnswer(lie(upload) if site == LIAR else upload, float(site), 0.1)
            why = take(site, answer.to_bytes())
            assert why is None
            heard.accepted.append(site)
        return heard


@pytest.mark.parametrize("robust", [RobustSettings("multi_krum", 1), RobustSettings(norm=3.0)], ids=["krum", "norm"])
def test_a_site_that_is_left_out_goes_back(robust: RobustSettings) -> None:
    alg, info, server, clients = federation("scaffold", robust)
    (name,), everyone = alg.tracked_uploads(), range(info.num_clients)
    for _ in range(ROUNDS - 1):
        report = deployed_round(Sites(clients), server, RUN, everyone, everyone, 1)  # type: ignore[arg-type]
        assert list(report.rejected) == [LIAR]
        assert report.rejected[LIAR].startswith("robust.")
        assert report.train_loss == pytest.approx(sum(site for site in everyone if site != LIAR) / 4)
        assert set(server.counted) == set(everyone) - {LIAR}
    for c, client in enumerate(clients):
        client.begin(server.broadcast(c), K)
    assert float(clients[LIAR].state[name].norm()) == 0
    mean = torch.stack([client.state[name][0] for client in clients]).double().mean(0)
    torch.testing.assert_close(server.state[name].double(), mean, rtol=1e-6, atol=1e-12)


def test_too_few_uploads_for_the_rule_leave_the_round_open() -> None:
    _, _, server, clients = federation("localadamw", RobustSettings("multi_krum", 1))
    for c in range(4):
        server.add(clients[c].fit(server.broadcast(c), quadratic_batches(c, 0), slope), client=c)
    assert server.fewest == 5
    with pytest.raises(RunError, match=r"round 1: 4 accepted uploads, robust.rule=multi_krum .* needs 5"):
        server.aggregate()
    server.add(clients[4].fit(server.broadcast(4), quadratic_batches(4, 0), slope), client=4)
    server.aggregate()
    assert server.round == 1


def test_a_rule_that_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"clients_per_round: found 5, but robust.rule=multi_krum"):
        federation("localadamw", RobustSettings("multi_krum", 2))
