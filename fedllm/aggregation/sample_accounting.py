"""Epsilon of each client's samples, for clients that differ in sampling rate and in steps taken.

A step of a client is one noised sum of which each of its samples is part with probability q. After T steps its samples
have SampledGaussian(z, q).epsilon(T, delta). All clients have the same noise z, and epsilon grows with q and with T.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fedllm.aggregation.accounting import SampledGaussian, noise_for
from fedllm.common.console import ProgressCallback

_COARSE, _MIDDLE, _FINE = 1e-2, 1e-3, 1e-4  # widths of the cells; wider ones give a larger epsilon, if anything
_AROUND = 4  # clients on each side of the median whose order is computed


class Steps(NamedTuple):
    """What a client has done: its samples' probability q in each step, and the number T of its steps."""

    rate: float
    times: int


class Spent(NamedTuple):
    """Epsilon of the client with the most, and of the client in the middle."""

    worst: float
    median: float


def spent(noise: float, delta: float, clients: Sequence[Steps]) -> Spent:
    """Epsilon of these clients' samples; infinite without noise."""
    return Spent(worst(noise, delta, clients), median(noise, delta, clients))


def worst(noise: float, delta: float, clients: Iterable[Steps]) -> float:
    """The largest epsilon, exactly: of the clients that no other exceeds in both q and T, those are computed whose
    upper bound from wide cells is above what is found."""
    found = 0.0
    bounds = {each: _bound(noise, delta, each) for each in _front(clients)}
    for each in sorted(bounds, key=lambda each: -bounds[each]):
        if bounds[each] > found:
            found = max(found, _exact(noise, delta, each))
    return found


def median(noise: float, delta: float, clients: Sequence[Steps]) -> float:
    """Epsilon of the client in the middle, of an even number the upper one of two.

    The clients are ordered by q^2 T, the order of epsilon where steps are many, and the nine in the middle by epsilon
    itself, from wide cells.
    """
    order = sorted(clients, key=lambda each: each.rate**2 * each.times)
    place = len(order) // 2
    begin = max(0, place - _AROUND)
    near = sorted(order[begin : place + _AROUND + 1], key=lambda each: _bound(noise, delta, each))
    return _exact(noise, delta, near[place - begin])


def largest_delta(noise: float, epsilon: float, clients: Iterable[Steps]) -> float:
    """The smallest delta at which no client exceeds this epsilon."""
    return max(SampledGaussian(noise, each.rate).delta(each.times, epsilon) for each in _front(clients))


def noise_for_all(
    epsilon: float, delta: float, clients: Sequence[Steps], progress: ProgressCallback | None = None
) -> float:
    """The noise with which the client with the largest epsilon has this one, or up to 0.2 % less."""
    found, front = 0.0, _front(clients)
    for each in sorted(front, key=lambda each: -_bound(1.0, delta, each)):
        if not found or _exact(found, delta, each) > epsilon:
            found = max(found, noise_for(epsilon, delta, each.rate, each.times, progress))
    while worst(found, delta, front) > epsilon:  # cells here are wider than those of noise_for
        found *= 1.0002
    return found


def _front(clients: Iterable[Steps]) -> list[Steps]:
    """The clients that no other exceeds in both q and T, each pair once."""
    found: list[Steps] = []
    for each in sorted(set(clients), reverse=True):
        if each.times > max((other.times for other in found), default=0):
            found.append(each)
    return found


def _bound(noise: float, delta: float, each: Steps) -> float:
    """A quick upper bound of epsilon, near enough for an order of clients."""
    found = _epsilon(noise, delta, each, _COARSE)
    return found if found > 1 else _epsilon(noise, delta, each, _MIDDLE)


def _exact(noise: float, delta: float, each: Steps) -> float:
    """Epsilon to about 1e-3 of its value or better."""
    found = _epsilon(noise, delta, each, _MIDDLE)
    return found if found > 1 or math.isinf(found) else _epsilon(noise, delta, each, _FINE)


@lru_cache(maxsize=4096)
def _epsilon(noise: float, delta: float, each: Steps, cells: float) -> float:
    return SampledGaussian(noise, each.rate).epsilon(each.times, delta, cells)
