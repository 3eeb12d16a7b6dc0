"""Batch norm's running statistics in a federation: a loop by hand, rejected clients, bytes, and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_models import Pixels, cross_entropy, full_problem, small_net
from torch import Tensor

from fedllm import load_algorithm, simulate
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.common.errors import UserError
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.run_facts import RunFacts
from fedllm.federation.costs import traffic
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import BUFFERS, Setup
from fedllm.problems.full.problem import FullProblem

CLIENTS, SAMPLED, STEPS, RATE = 4, 2, 2, 0.1


def problem(**options: Any) -> FullProblem:
    return full_problem(small_net(), Pixels.draw(22), clients=CLIENTS, batch_size=3, steps=STEPS, **options)


def setup_of(of: FullProblem, name: str = "fedavg", **settings: Any) -> Setup:
    algorithm = load_algorithm(name, lr=RATE, **settings)
    return Setup(algorithm, of, round_info(algorithm, of, rounds=3, sampled=SAMPLED, tracked=None, local_steps=STEPS))


def test_running_statistics_are_refused_under_privacy() -> None:
    """Nobody clips them, and their mean would be released without noise."""
    setup = setup_of(problem(), weights="uniform")
    private = Pipeline.of(UploadsSettings(clip=1.0), setup.algorithm, 0, privacy=PrivacySettings(noise=1.0))
    with pytest.raises(UserError, match=r"privacy: clients also send buffers, which is not clipped.*model.norm=group"):
        replace(setup, pipeline=private).require_private()


def by_hand(of: FullProblem, rounds: int, *, local: bool, by_size: bool) -> tuple[Tensor, Tensor]:
    """FedAvg with torch.optim.SGD on plain models with batch norm; x and running statistics after some rounds."""
    names = of.model.buffers.names
    x, statistics = of.initial(), of.model.first_buffers.clone()
    kept: dict[int, Tensor] = {}
    for t in range(rounds):
        clients, _ = sample(0, t, CLIENTS, SAMPLED, SAMPLED)
        ends, ends_of_statistics, weights = [], [], []
        for client in clients:
            net = small_net().train()
            of.space.scatter(net, x)
            first = kept.get(client, of.model.first_buffers) if local else statistics
            for name, value in zip(names, first.split(4), strict=True):
                net.get_buffer(name).copy_(value)
            optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
            for k in range(STEPS):
                index = torch.from_numpy(of.batches.indices(client, t, k))
                optimizer.zero_grad()
                rows = of.samples.rows(index)
                cross_entropy(net(**rows).logits, of.samples.targets[index]).mean().backward()
                optimizer.step()
            ends.append(of.space.gather(net))
            ends_of_statistics.append(torch.cat([net.get_buffer(name) for name in names]))
            weights.append(float(len(of.batches.parts[client])) if by_size else 1.0)
            kept[client] = ends_of_statistics[-1]
        share = (torch.tensor(weights) / sum(weights))[:, None]
        x, statistics = (torch.stack(ends) * share).sum(0), (torch.stack(ends_of_statistics) * share).sum(0)
    return x, statistics


@pytest.mark.parametrize("local", [False, True], ids=["average", "local"])
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_statistics_are_those_of_a_loop_by_hand(local: bool, weights: str) -> None:
    of = problem(local_buffers=local)
    algorithm = load_algorithm("fedavg", lr=RATE, weights=weights)
    found = simulate(algorithm, of, rounds=3, local_steps=STEPS, clients_per_round=SAMPLED, progress=False)
    x, statistics = by_hand(of, 3, local=local, by_size=weights == "size")
    other = by_hand(of, 3, local=not local, by_size=weights == "size")[1]
    assert found.buffers is not None
    assert (found.x - x).abs().max() < 1e-5
    assert (found.buffers - statistics).abs().max() < 1e-5
    assert (statistics - other).abs().max() > 1e-3  # so that the two ways can be told apart


@pytest.mark.parametrize("local", [False, True], ids=["average", "local"])
def test_statistics_count_in_the_bytes(local: bool) -> None:
    of = problem(local_buffers=local)
    setup = setup_of(of)
    state = start(setup)
    report = run_round(setup, state, [0, 1], [0, 1])
    vector, beside = 4 * of.dim, 4 * 8
    assert report.bytes_up == 2 * (vector + beside)
    assert report.bytes_down == 2 * (vector + (0 if local else beside))
    planned = traffic(setup.algorithm, setup.info, of.dim, buffers=of.buffers)
    assert (planned.bytes_up, planned.bytes_down) == (report.bytes_up, report.bytes_down)
    assert report.client_bytes == planned.client_bytes


@pytest.mark.parametrize("local", [False, True], ids=["average", "local"])
def test_how_clients_are_grouped_changes_no_bit(local: bool) -> None:
    found = []
    for stacked, parts in ((None, 1), (1, 1), (1, 2)):
        setup = setup_of(problem(local_buffers=local))
        state = start(setup)
        for clients in ([0, 1, 3], [1, 2, 3]):
            run_round(setup, state, clients, clients, Plan(stacked, parts=parts))
        found.append(state)
    for state in found[1:]:
        assert state.buffers is not None
        assert torch.equal(state.x, found[0].x)
        assert torch.equal(state.buffers, found[0].buffers)


def test_a_client_whose_statistics_are_not_finite_is_rejected() -> None:
    class Faulty(FullProblem):
        def train_step(self, X: Tensor, buffers: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            found = super().train_step(X, buffers, *rest)
            buffers[1] = torch.nan
            return found

    plain = problem()
    of = Faulty(plain.model.model, plain.samples, plain.batches, cross_entropy)
    setup = setup_of(of)
    state = start(setup)
    report = run_round(setup, state, [0, 1], [0, 1])
    assert list(report.rejected) == [1]
    assert "tensor 'buffers': 8 of 8 values are not finite" in report.rejected[1]
    assert state.buffers is not None
    assert torch.isfinite(state.buffers).all()


@pytest.mark.parametrize("local", [False, True], ids=["average", "local"])
def test_a_checkpoint_holds_the_statistics(tmp_path: Path, local: bool) -> None:
    """Two rounds and two more after a checkpoint have the bits of four."""
    rounds = ([0, 1], [2, 3], [1, 2], [0, 3])
    setup = setup_of(problem(local_buffers=local), "scaffold")
    whole = start(setup)
    for clients in rounds:
        run_round(setup, whole, clients, clients)

    (tmp_path / "files").mkdir()
    half = start(setup, folder=tmp_path / "files")
    for clients in rounds[:2]:
        run_round(setup, half, clients, clients)
    checkpoints = Checkpoints(tmp_path / "checkpoints", print)
    checkpoints.save(half, [], RunFacts(1, "auto", 1, "float32"))
    snapshot = checkpoints.latest()
    assert snapshot is not None
    (tmp_path / "again").mkdir()
    again = start(setup, folder=tmp_path / "again")
    snapshot.restore(again)
    for clients in rounds[2:]:
        run_round(setup, again, clients, clients)
    assert torch.equal(again.x, whole.x)
    assert torch.equal(again.buffers, whole.buffers)  # type: ignore[arg-type]
    ours, theirs = again.clients.get(range(CLIENTS)), whole.clients.get(range(CLIENTS))
    assert (BUFFERS in ours) == local
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    setup = setup_of(problem())
    (tmp_path / "files").mkdir()
    state = start(setup, folder=tmp_path / "files")
    checkpoints = Checkpoints(tmp_path / "checkpoints", print)
    state.buffers = None
    checkpoints.save(state, [], RunFacts(1, "auto", 1, "float32"))
    snapshot = checkpoints.latest()
    assert snapshot is not None
    with pytest.raises(UserError, match=r"tensor 'buffers': found nothing, expected \[8\] torch.float32"):
        snapshot.restore(start(setup))
