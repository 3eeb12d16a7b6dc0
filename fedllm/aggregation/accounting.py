"""What a number of noised sums tells of one contributor: epsilon, delta, and the noise for a wanted epsilon.

A contributor takes part in each sum by itself with probability q and adds a vector of L2 norm at most 1. The sum gets
normal noise of standard deviation z in each coordinate. Two runs are neighbours where one has the contributor and the
other has not. For q = 1 there is a closed form (Balle and Wang 2018, Theorem 8), with mu = sqrt(T)/z for T sums:

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

For q < 1 dp-accounting composes privacy loss distributions numerically, which gives an upper bound.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

from fedllm.common.errors import RunError, UserError

CLOSED_FORM = "closed form"
INSTALL = "pip install 'fedllm[privacy]'"
_GRID, _COARSE = 1e-4, 1e-3  # widths of a privacy loss distribution's cells; the first is dp-accounting's default
_ORDERS = [1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]  # for a first estimate of epsilon
_LARGE = 20.0  # epsilon above which the cells grow with epsilon
_STEPS = 40  # computations of epsilon at most, until the noise is found

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SampledGaussian:
    """One noised sum: its noise z over the largest norm, and the probability q with which a contributor takes part."""

    noise: float
    rate: float

    def epsilon(self, times: int, delta: float, grid: float = _GRID) -> float:
        """Epsilon of `times` sums at this delta; infinite without noise. grid: width of the cells."""
        if times == 0:
            return 0.0
        if self.noise == 0:
            return math.inf
        if self.rate == 1:
            return full_epsilon(self.noise, times, delta)
        return max(0.0, float(self._composed(times, delta, grid).get_epsilon_for_delta(delta)))

    def delta(self, times: int, epsilon: float) -> float:
        """Delta of `times` sums at this epsilon."""
        if times == 0 or self.noise == 0:
            return float(times > 0)
        if self.rate == 1:
            return full_delta(self.noise, times, epsilon)
        return float(self._composed(times, 1e-6, _GRID).get_delta_for_epsilon(epsilon))

    def most_times(self, epsilon: float, delta: float, most: int) -> int:
        """The largest number of sums, `most` or fewer, with at most this epsilon.

        Coarse cells give a number that is too small if anything, from which exact ones count on."""
        if self.epsilon(most, delta) <= epsilon:
            return most
        times = last_fitting(most, lambda times: self.epsilon(times, delta, _COARSE) <= epsilon)
        while times + 1 < most and self.epsilon(times + 1, delta) <= epsilon:
            times += 1
        return times

    def _composed(self, times: int, delta: float, grid: float) -> Any:
        """The privacy loss distribution of `times` sums."""
        dp, rdp, _ = _library()
        with _without_warnings():
            event = dp.PoissonSampledDpEvent(self.rate, dp.GaussianDpEvent(self.noise))
            rough = rdp.RdpAccountant(_ORDERS).compose(event, times).get_epsilon(delta)
            return _loss_of_one(self.noise, self.rate, grid * max(1.0, rough / _LARGE)).self_compose(times)


def last_fitting(end: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `end` - 1 that fits, where 0 does, and none above one that does not."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=4)
def _loss_of_one(noise: float, rate: float, cells: float) -> Any:
    """The privacy loss distribution of one sum."""
    return _library()[2].from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=cells)


def accountant(rate: float) -> str:
    """What computes epsilon at this rate, for the records of a run."""
    return CLOSED_FORM if rate == 1 else f"dp-accounting {version('dp-accounting')} PLD"


def full_delta(noise: float, times: int, epsilon: float) -> float:
    """Delta of `times` sums in which the contributor always takes part."""
    mu = math.sqrt(times) / noise
    low, high = epsilon + _log_phi(-mu / 2 - epsilon / mu), _log_phi(mu / 2 - epsilon / mu)
    return -math.exp(high) * math.expm1(low - high) if low < high else 0.0


def full_epsilon(noise: float, times: int, delta: float) -> float:
    """Epsilon of `times` sums in which the contributor always takes part."""
    low, high = 0.0, 1.0
    while full_delta(noise, times, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if full_delta(noise, times, middle) > delta else (low, middle)
    return high


def noise_for(epsilon: float, delta: float, rate: float, times: int, progress: Progress | None = None) -> float:
    """The noise with which `times` sums have this epsilon at this delta, or up to 0.2 % less.

    A secant in logarithms, with coarse cells until it is near. progress(what, done, total): called before each step,
    which may take seconds.
    """
    noise, grid, power = 1.0, _COARSE, -1.0  # epsilon grows about as noise^power
    before: tuple[float, float] | None = None
    for step in range(_STEPS):
        if progress is not None:
            progress("looking for the noise, computations of epsilon", step, _STEPS)
        found = SampledGaussian(noise, rate).epsilon(times, delta, grid)
        over = math.log(max(found, 1e-12) / epsilon)
        if -1.5e-3 < over <= 0 and grid == _GRID:
            return _rounded_up(noise)
        if before is not None and abs(over - before[1]) > 1e-6 and noise != before[0]:
            power = min(-0.3, max(-6.0, (over - before[1]) / math.log(noise / before[0])))
        if abs(over) < 0.02 and grid != _GRID:
            grid, before = _GRID, None
            continue
        before = noise, over
        noise *= math.exp(min(1.0, max(-1.0, (over + 7e-4) / -power)))
    raise RunError(f"privacy: no noise found for epsilon {epsilon} and delta {delta} over {times} rounds; give noise")


def _rounded_up(noise: float) -> float:
    """The next number with four digits."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
    return float(f"{math.ceil(noise / unit) * unit:.4g}")


def _log_phi(x: float) -> float:
    """The logarithm of the normal distribution function."""
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def _library() -> tuple[ModuleType, ModuleType, ModuleType]:
    """dp_accounting, its RDP accountant, its privacy loss distributions. Raises UserError where it is missing."""
    try:
        import dp_accounting
        from dp_accounting import rdp
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise UserError(f"privacy: epsilon under sampling needs dp-accounting; run: {INSTALL}") from error
    return dp_accounting, rdp, privacy_loss_distribution


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides what the library says of orders that it leaves out: the bound remains one."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
