"""Epsilon of clients that differ in rate and steps: the worst and the median against all, one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedllm.aggregation.accounting import full_epsilon
from fedllm.aggregation.sample_accounting import Steps, largest_delta, noise_for_all, spent, worst

pytest.importorskip("dp_accounting")
DELTA = 1e-4


def one(noise: float, each: Steps, delta: float = DELTA) -> float:
    """dp-accounting's own answer, with its own cells."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    event = PoissonSampledDpEvent(each.rate, GaussianDpEvent(noise))
    return float(PLDAccountant(value_discretization_interval=1e-3).compose(event, each.times).get_epsilon(delta))


@pytest.mark.slow
def test_worst_and_median_are_those_of_all_clients() -> None:
    draw = np.random.default_rng(1)
    rates, rounds = 8 / draw.integers(20, 300, 15), draw.integers(3, 12, 15)
    clients = [Steps(float(rate), int(5 * count)) for rate, count in zip(rates, rounds, strict=True)]
    every = sorted(one(6.0, each) for each in clients)
    found = spent(6.0, DELTA, clients)
    assert found.worst == pytest.approx(every[-1], rel=2e-3)
    assert found.median == pytest.approx(every[7], rel=2e-3)
    assert every[7] < 0.9 * every[-1]


def test_a_client_that_takes_all_its_samples_has_the_closed_form() -> None:
    clients = [Steps(1.0, 10), Steps(0.02, 10), Steps(0.01, 40)]
    assert worst(2.0, DELTA, clients) == pytest.approx(full_epsilon(2.0, 10, DELTA), rel=1e-9)
    assert worst(2.0, DELTA, [*clients, Steps(1.0, 30)]) == pytest.approx(full_epsilon(2.0, 30, DELTA), rel=1e-9)


def test_no_steps_spend_nothing_and_no_noise_everything() -> None:
    assert spent(1.0, DELTA, [Steps(0.1, 0), Steps(0.5, 0)]) == (0.0, 0.0)
    assert math.isinf(spent(0.0, DELTA, [Steps(0.1, 3), Steps(0.5, 3)]).worst)


@pytest.mark.slow
def test_noise_and_delta_bound_every_client() -> None:
    clients = [Steps(0.5, 5), Steps(0.1, 60), Steps(0.05, 60)]
    noise = noise_for_all(1.0, DELTA, clients)
    every = [one(noise, each) for each in clients]
    assert 0.99 < max(every) <= 1.001
    assert worst(noise, DELTA, clients) <= 1.0
    delta = largest_delta(noise, 1.0, clients)
    assert delta == pytest.approx(DELTA, rel=0.05)
