"""What the theorems on FAdamGC say, seen on quadratic clients with a known optimum.

Three statements of "Gradient Correction in Federated Learning with Adaptive Optimization" (GC): linear speed-up with
the sampled clients (Thm 5.2 and 5.4), no need for bounded heterogeneity (beside Thm C.3 of FA-NT), and, for
beta2 = 0, steps of at most eta.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedllm.algorithms import load_algorithm
from fedllm.common.console import ProgressCallback
from fedllm.federation.simulation import simulate
from fedllm.problems.base import Problem
from fedllm.problems.quadratic import QuadraticProblem


@dataclass(frozen=True)
class Setting:
    """Quadratic clients (QuadraticProblem.random) and how they are trained, from x0 = 0.

    clients: N. sampled: S, all of them tracked. spread: standard deviation of each coordinate of the clients'
    minimisers. noise: that of each coordinate of a stochastic gradient.
    """

    algorithm: str
    clients: int
    sampled: int
    spread: float
    noise: float
    lr: float
    betas: tuple[float, float]
    dim: int = 10
    rounds: int = 150
    local_steps: int = 10


SPEED_UP = Setting("fadamgc", clients=64, sampled=1, spread=1.0, noise=1.0, lr=0.01, betas=(0.9, 0.9))
SAMPLED = (1, 4, 16, 64)
HETEROGENEITY = Setting("fadamgc", clients=8, sampled=8, spread=0.5, noise=0.2, lr=0.05, betas=(0.9, 0.99))
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0)
ALGORITHMS = ("fadamgc", "fa_nt", "localadam")
BETA2 = (0.0, 0.99)


@dataclass(frozen=True)
class Point:
    """One setting over several seeds: the errors after the first half of the rounds.

    gradient [seeds]: mean over the second half of the rounds of |grad f(x)|^2, the quantity of the theorems. distance
    [seeds]: the same mean of |x - x*|^2.
    """

    setting: Setting
    gradient: tuple[float, ...]
    distance: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of `gradient` over seeds."""
        return statistics.fmean(self.gradient)


@dataclass(frozen=True)
class Findings:
    """All that the study measures. steps: {beta2: the longest step of a coordinate of FAdamGC, in units of eta}."""

    speed_up: list[Point]
    heterogeneity: list[Point]
    steps: dict[float, float]

    @property
    def slope(self) -> float:
        """The exponent a of error = c S^a, from the smallest S to the largest; -1 for a linear speed-up."""
        first, last = self.speed_up[0], self.speed_up[-1]
        ratio = torch.tensor([last.mean / first.mean, last.setting.sampled / first.setting.sampled]).log()
        return float(ratio[0] / ratio[1])

    def line(self, algorithm: str) -> list[Point]:
        """The points of one algorithm over the spreads."""
        return [point for point in self.heterogeneity if point.setting.algorithm == algorithm]


class WatchedProblem(Problem):
    """Gives another problem's gradients, and keeps the longest step of a coordinate between two of them.

    longest: max |x_i' - x_i| over all clients, coordinates and steps but the last one of each round.
    """

    def __init__(self, problem: Problem) -> None:
        self.dim, self.num_clients, self.longest = problem.dim, problem.num_clients, 0.0
        self._problem, self._before = problem, torch.empty(0)

    def initial(self) -> Tensor:
        return self._problem.initial()

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        if step > 0:
            self.longest = max(self.longest, float((X - self._before).abs().max()))
        self._before = X.clone()
        return self._problem.gradient(X, clients, round, step)

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        return self._problem.full_gradient(x, clients)


def study(seeds: int, progress: ProgressCallback) -> Findings:
    """Measures everything with the seeds 0, 1, ..."""
    speed_up = [replace(SPEED_UP, sampled=sampled) for sampled in SAMPLED]
    spreads = [replace(HETEROGENEITY, algorithm=name, spread=s) for name in ALGORITHMS for s in SPREADS]
    points = list(_measured([*speed_up, *spreads], seeds, progress))
    steps = {beta2: longest_step(replace(HETEROGENEITY, betas=(0.9, beta2)), seed=0) for beta2 in BETA2}
    return Findings(points[: len(speed_up)], points[len(speed_up) :], steps)


def _measured(settings: Sequence[Setting], seeds: int, progress: ProgressCallback) -> Iterator[Point]:
    for number, setting in enumerate(settings):
        progress("settings", number, len(settings))
        yield measure(setting, range(seeds))


def measure(setting: Setting, seeds: Sequence[int]) -> Point:
    """Trains a setting with each seed. The seed draws the clients, the samples of clients and the noise."""
    errors = [_errors(setting, seed) for seed in seeds]
    return Point(setting, tuple(gradient for gradient, _ in errors), tuple(distance for _, distance in errors))


def longest_step(setting: Setting, seed: int) -> float:
    """The longest step of a coordinate (WatchedProblem), in units of eta."""
    problem = WatchedProblem(_problem(setting, seed))
    _simulate(setting, problem, seed)
    return problem.longest / setting.lr


def _errors(setting: Setting, seed: int) -> tuple[float, float]:
    """The errors of Point with one seed."""
    problem = _problem(setting, seed)
    history = _simulate(setting, problem, seed)[1 + setting.rounds // 2 :]
    away = history - problem.optimum()
    gradients = away @ problem.H.mean(0)  # of a quadratic: H (x - x*)
    return float(gradients.square().sum(1).mean()), float(away.square().sum(1).mean())


def _problem(setting: Setting, seed: int) -> QuadraticProblem:
    return QuadraticProblem.random(setting.clients, setting.dim, seed=seed, spread=setting.spread, noise=setting.noise)


def _simulate(setting: Setting, problem: Problem, seed: int) -> Tensor:
    """Every x [rounds + 1, d]. FAdamGC starts its y_i from the full local gradients (GC Alg. 1, line 1)."""
    start: dict[str, Any] = {"tracking_init": "gradient"} if setting.algorithm == "fadamgc" else {}
    alg = load_algorithm(setting.algorithm, lr=setting.lr, betas=setting.betas, **start)
    result = simulate(
        alg,
        problem,
        rounds=setting.rounds,
        local_steps=setting.local_steps,
        clients_per_round=setting.sampled,
        seed=seed,
        progress=False,
    )
    return result.history
