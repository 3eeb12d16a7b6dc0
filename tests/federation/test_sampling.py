"""Poisson sampling: how many clients a round has, and rounds that have none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.privacy import seeded
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.federation.sampling import sample


def test_the_numbers_of_clients_are_binomial_and_each_client_has_its_rate() -> None:
    """2,000 rounds, N 40, q 0.1: chi-square over the counts 0 to 8 and more, at a level of 1e-4."""
    rounds, clients, q = 2000, 40, 0.1
    drawn = [sample(3, t, clients, 4, 2, "poisson") for t in range(rounds)]
    counts = np.bincount([min(8, len(chosen)) for chosen, _ in drawn], minlength=9)
    chances = [math.comb(clients, k) * q**k * (1 - q) ** (clients - k) for k in range(8)]
    expected = rounds * np.array([*chances, 1 - sum(chances)])
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.8  # chi-square of 8 degrees, 1 - 1e-4
    each = np.bincount([client for chosen, _ in drawn for client in chosen], minlength=clients)
    assert np.abs(each - rounds * q).max() < 4.5 * math.sqrt(rounds * q * (1 - q))
    tracked = sum(len(tracked) for _, tracked in drawn) / sum(len(chosen) for chosen, _ in drawn)
    assert tracked == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(rounds * 4))
    assert all(set(tracked) <= set(chosen) for chosen, tracked in drawn)


def test_all_of_all_and_the_same_again() -> None:
    assert sample(0, 1, 5, 5, 5, "poisson") == (list(range(5)), list(range(5)))
    assert sample(0, 1, 50, 5, 5, "poisson") == sample(0, 1, 50, 5, 5, "poisson")


def empty_round(seed: int, clients: int, rounds: int) -> int:
    """The first round, from 0, without clients where one of `clients` is expected."""
    return next(t for t in range(rounds) if not sample(seed, t, clients, 1, 1, "poisson")[0])


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadamw"])
def test_a_round_without_clients_changes_nothing(name: str) -> None:
    algorithm, rounds = load_algorithm(name, weights="uniform"), 12
    problem = QuadraticProblem.random(num_clients=6, dim=8)
    given = {"rounds": rounds, "local_steps": 1, "clients_per_round": 1, "progress": False}
    done = simulate(algorithm, problem, sampling="poisson", **given)
    t = empty_round(0, 6, rounds)
    assert torch.equal(done.history[t + 1], done.history[t])
    assert done.loss[t] is None
    assert not torch.equal(done.history[-1], done.history[0])


def test_a_round_without_clients_releases_noise_under_privacy() -> None:
    algorithm, rounds = load_algorithm("fedavg", weights="uniform"), 12
    problem = QuadraticProblem.random(num_clients=6, dim=8)
    private = {"uploads": UploadsSettings(clip=0.5), "privacy": PrivacySettings(noise=2.0)}
    given = {"rounds": rounds, "local_steps": 1, "clients_per_round": 1, "progress": False}
    done = simulate(algorithm, problem, sampling="poisson", **given, **private)
    t = empty_round(0, 6, rounds)
    moved = done.history[t + 1] - done.history[t]
    assert torch.allclose(moved, 2.0 * 0.5 * seeded(0)("d", t, 8), atol=1e-12)
