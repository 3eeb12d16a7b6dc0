"""Client-level privacy on real sites: the server's noise, what a site may ask for, and rounds without sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_clients import K, Point, quadratic, quadratic_batches, slope

from fedllm import load_algorithm
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.client import Client
from fedllm.common.errors import RunError, UserError
from fedllm.deployment.rounds import deployed_round
from fedllm.federation.info import round_info
from fedllm.server import Server

CLIP = UploadsSettings(clip=0.05)
NOISE = PrivacySettings(noise=1.0)


def server_of(privacy: PrivacySettings | None, name: str = "fedcm") -> Server:
    problem, alg = quadratic(), load_algorithm(name)
    info = round_info(alg, problem, rounds=5, sampled=problem.num_clients, tracked=None, local_steps=K)
    return Server(alg, problem.initial(), info, uploads=CLIP, privacy=privacy)


def client_of(server: Server, privacy: PrivacySettings | None = None) -> Client:
    return Client(Point(quadratic().initial()), server.algorithm, server.info, uploads=CLIP, privacy=privacy)


def fit(server: Server, client: Client, number: int) -> Any:
    return client.fit(server.broadcast(number), quadratic_batches(number, 0), slope)


def test_two_servers_draw_different_noise_and_without_noise_they_agree() -> None:
    def round_of(privacy: PrivacySettings) -> torch.Tensor:
        server = server_of(privacy)
        for number in range(server.info.num_clients):
            assert server.add(fit(server, client_of(server), number), client=number) is None
        return server.aggregate()

    assert torch.equal(round_of(PrivacySettings(noise=0.0)), round_of(PrivacySettings(noise=0.0)))
    one, two = round_of(NOISE), round_of(NOISE)
    assert not torch.equal(one, two)
    assert float((one - two).norm()) < 10 * 2 * 0.05 / server_of(NOISE).info.sampled * len(one) ** 0.5


def test_the_denominator_is_the_expected_number() -> None:
    """Half of the sites' uploads are lost: each counts as before. A round without any upload can end."""
    server = server_of(PrivacySettings(noise=0.0))
    before = server.x.clone()
    assert server.add(fit(server, client_of(server), 0), client=0) is None
    moved = (server.aggregate() - before) * server.info.sampled
    assert 0 < float(moved.norm()) <= 0.05 * (1 + 1e-6)
    assert torch.equal(server.aggregate(), server.skip())
    assert server.round == 3


def test_without_privacy_a_round_of_nobody_is_skipped_and_one_of_no_upload_is_not() -> None:
    server = server_of(None)
    before = server.x.clone()
    assert torch.equal(server.skip(), before)
    assert server.round == 1
    with pytest.raises(RunError, match="0 accepted uploads"):
        server.aggregate()


@pytest.mark.parametrize("privacy", [None, NOISE])
def test_a_deployed_round_without_sites_asks_nobody(privacy: PrivacySettings | None) -> None:
    server = server_of(privacy)
    before = server.x.clone()
    report = deployed_round(None, server, "run", [], [], 1)  # type: ignore[arg-type]
    assert (report.clients, report.missing, server.round) == ([], [], 1)
    assert torch.equal(server.x, before) == (privacy is None)


def test_a_site_that_asks_for_noise_refuses_a_server_without_it() -> None:
    asking = client_of(server_of(NOISE), privacy=NOISE)
    fit(server_of(NOISE), asking, 0)
    fit(server_of(NOISE), client_of(server_of(NOISE)), 0)  # one that does not ask compares nothing
    for other in (None, PrivacySettings(noise=0.5)):
        with pytest.raises(UserError, match=r"privacy: found .*, expected \{'level': 'client', 'noise': 1.0\}"):
            fit(server_of(other), asking, 0)


def test_a_servers_file_of_a_private_run_is_not_continued_without_noise(tmp_path: Path) -> None:
    path = tmp_path / "server.safetensors"
    server_of(NOISE).save(path)
    server_of(NOISE).load(path)
    with pytest.raises(UserError, match=r"privacy: found \{'level': 'client', 'noise': 1.0\}, expected None"):
        server_of(None).load(path)
