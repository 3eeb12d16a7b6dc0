"""Epsilon, delta and noise against dp-accounting, a closed form, and one another."""

from __future__ import annotations

import math
import sys
from statistics import NormalDist

import pytest

from fedllm.aggregation.accounting import SampledGaussian, full_delta, full_epsilon, noise_for
from fedllm.common.errors import UserError

# noise, rate, rounds, delta, and epsilon of dp-accounting 0.6.0's PLDAccountant, add or remove one, as UPLOADS.md lists
TABLE = [
    (1.0, 0.1, 100, 1e-5, 7.047),
    (1.1, 256 / 60000, 14062, 1e-5, 2.3817),
    (4.0, 0.01, 10000, 1e-5, 0.947),
    (1.0, 1e-3, 1000, 1e5**-1.1, 0.1669),
]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "rounds", "delta", "expected"), TABLE)
def test_epsilon_is_that_of_dp_accounting_and_of_the_table(
    noise: float, rate: float, rounds: int, delta: float, expected: float
) -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    found = SampledGaussian(noise, rate).epsilon(rounds, delta)
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
    theirs = PLDAccountant().compose(event, rounds).get_epsilon(delta)
    assert found == pytest.approx(theirs, abs=1e-3)
    assert found == pytest.approx(expected, rel=1e-3)


def test_everyone_in_every_round_has_the_closed_form() -> None:
    """mu = sqrt(T)/z; delta by the normal distribution of the standard library, at an epsilon of moderate size."""
    assert full_epsilon(1.0, 100, 1e-5) == pytest.approx(91.817, abs=1e-3)
    phi, mu, epsilon = NormalDist().cdf, math.sqrt(4) / 5.0, 0.7
    expected = phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
    assert full_delta(5.0, 4, epsilon) == pytest.approx(expected, rel=1e-9)
    assert full_epsilon(5.0, 4, expected) == pytest.approx(epsilon, rel=1e-6)
    assert SampledGaussian(5.0, 1.0).delta(4, epsilon) == pytest.approx(expected, rel=1e-9)


def test_sampling_almost_everyone_is_near_the_closed_form() -> None:
    found = SampledGaussian(3.0, 1 - 1e-9).epsilon(5, 1e-4, grid=1e-3)
    assert found == pytest.approx(full_epsilon(3.0, 5, 1e-4), rel=1e-3)


def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise() -> None:
    def epsilon(noise: float, rate: float, rounds: int) -> float:
        return SampledGaussian(noise, rate).epsilon(rounds, 1e-4, grid=1e-3)

    assert epsilon(2.0, 0.1, 10) < epsilon(2.0, 0.1, 20) < epsilon(2.0, 0.2, 20) < epsilon(1.5, 0.2, 20)
    assert epsilon(2.0, 0.2, 20) < epsilon(2.0, 1.0, 20)
    assert SampledGaussian(0.0, 0.5).epsilon(1, 1e-4) == math.inf
    assert SampledGaussian(1.0, 0.5).epsilon(0, 1e-4) == 0.0


@pytest.mark.parametrize("rate", [1.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_the_noise_for_an_epsilon_has_that_epsilon(rate: float) -> None:
    """At most what was asked for, and not more than 0.3 % below."""
    found = SampledGaussian(noise_for(2.0, 1e-3, rate, 50), rate).epsilon(50, 1e-3)
    assert 0.997 * 2.0 <= found <= 2.0


def test_a_budget_ends_before_the_round_beyond_it() -> None:
    one = SampledGaussian(2.0, 1.0)
    last = one.most_times(5.0, 1e-3, 100)
    assert one.epsilon(last, 1e-3) <= 5.0 < one.epsilon(last + 1, 1e-3)
    assert one.most_times(1e6, 1e-3, 100) == 100
    assert one.most_times(0.1, 1e-3, 100) == 0


@pytest.mark.slow
def test_a_budget_under_sampling() -> None:
    one = SampledGaussian(2.0, 0.2)
    last = one.most_times(1.5, 1e-3, 40)
    assert one.epsilon(last, 1e-3) <= 1.5 < one.epsilon(last + 1, 1e-3)


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"needs dp-accounting; run: pip install 'fedllm\[privacy\]'"):
        SampledGaussian(1.0, 0.123).epsilon(10, 1e-3)
    assert SampledGaussian(1.0, 1.0).epsilon(10, 1e-3) > 0
