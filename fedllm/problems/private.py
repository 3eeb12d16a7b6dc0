"""Differential privacy of each client's samples: clipped sums of their gradients under noise (DP-SGD).

In each local step a client takes each of its n samples by itself with probability q, so b = q n samples on average,
and hands its optimizer

    g = (sum_j clip(grad_j, C) + N(0, (z C)^2 I)) / b

(Abadi et al. 2016, Algorithm 1). Everything that it computes from g is post-processing: every algorithm is private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedllm.aggregation.clipping import row_norms
from fedllm.aggregation.privacy import from_system
from fedllm.common.errors import UserError
from fedllm.common.profiling import section
from fedllm.common.seeding import numpy_rng
from fedllm.problems.base import Problem, SampleGradients

Noise = Callable[[int, int, int, int], Tensor]  # (round, client, step, n) -> [n], standard normal


class Batches(Protocol):
    """Who takes which samples: see data.poisson_batches.PoissonBatches."""

    def expected(self, client: int) -> int: ...

    def indices(self, client: int, round: int, step: int) -> np.ndarray: ...


def seeded_noise(seed: int) -> Noise:
    """Noise that depends on (seed, round, client, step) alone. Who knows the seed can take it off."""

    def draw(round: int, client: int, step: int, n: int) -> Tensor:
        return torch.from_numpy(numpy_rng(seed, "noise", round, client, step).standard_normal(n))

    return draw


def system_noise(round: int, client: int, step: int, n: int) -> Tensor:
    """Noise from the system's cryptographic generator, which cannot be had again."""
    return from_system("", round, n)


class PrivateProblem(Problem):
    """The clients of `problem` with private gradients, see above. problem: it has `sample_gradients`.

    clip: C. noise: z. draws: where the noise comes from. A sample whose gradient is not finite adds 0. The losses are
    the sums of the samples' losses by b; they get no noise.
    """

    def __init__(self, problem: Problem, batches: Batches, *, clip: float, noise: float, draws: Noise) -> None:
        if problem.buffers is not None:
            raise UserError(
                f"{type(problem).__name__}: has running statistics (batch norm), which mix the samples of a batch and "
                "are sent without noise; expected a model without for privacy.level=sample; set model.norm=group"
            )
        self.dim, self.num_clients, self.blocks = problem.dim, problem.num_clients, problem.blocks
        self.smaller_steps = problem.smaller_steps
        self._problem, self._batches = problem, batches
        self._clip, self._noise, self._draws = clip, noise, draws

    def initial(self) -> Tensor:
        return self._problem.initial()

    def steps(self, clients: Sequence[int], round: int) -> Tensor | None:
        return self._problem.steps(clients, round)

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return self._problem.sizes(clients)

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        raise UserError("tracking_init=gradient: full gradients get no noise; set algorithm.tracking_init=zero")

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        with section("data"):
            samples = [self._batches.indices(client, round, step) for client in clients]
        losses, sums = clipped_sums(X, self._problem.sample_gradients(X, samples, clients, round, step), self._clip)
        with section("optimizer"):
            expected = X.new_tensor([self._batches.expected(client) for client in clients])
            if self._noise:
                for total, client in zip(sums, clients, strict=True):
                    total.add_(self._draws(round, client, step, self.dim).to(X), alpha=self._noise * self._clip)
            return losses / expected, sums.div_(expected[:, None])


def clipped_sums(X: Tensor, found: Iterator[SampleGradients], clip: float) -> tuple[Tensor, Tensor]:
    """For each row of X [C, d], the sum [C] of its samples' losses and that [C, d] of their clipped gradients.

    The gradients of a row are added one by one in their order, so that the other rows do not change its bits.
    """
    losses, sums = X.new_zeros(len(X)), torch.zeros_like(X)
    for part in found:
        with section("optimizer"):
            norms = row_norms(part.gradients)[:, 0]
            finite = norms.isfinite()
            scales = torch.where(finite, (clip / norms).clamp(max=1.0), 0.0).to(X)
            for n, row in enumerate(part.rows):
                losses[row] += part.losses[n]
                sums[row].addcmul_(part.gradients[n].where(finite[n], 0.0), scales[n])
    return losses, sums
