"""Client-level differential privacy: normal noise on the sums of the clipped uploads, and a fixed denominator.

m vectors that a client sends, clipped to norms C_k and divided by C_k sqrt(m), are together one vector of norm at most
1. So noise of standard deviation z sqrt(m) C_k on each sum is one Gaussian mechanism with multiplier z, whatever m is:

    mean_k = (sum_i sent_ik + N(0, (z sqrt(m) C_k)^2 I)) / S          S: the expected number of clients
    total_k = sum_i sent_ik + N(0, (z sqrt(m) C_k)^2 I)               tracked vectors
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedllm.aggregation.reduction import WeightedMean
from fedllm.aggregation.uploads import Declared
from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo
from fedllm.common.errors import UserError
from fedllm.common.seeding import numpy_rng

Draws = Callable[[str, int, int], Tensor]  # (vector's name, round, n) -> [n], float64, standard normal
_CHUNK = 1 << 20  # values drawn from the system at once


def seeded(seed: int) -> Draws:
    """Draws that depend on the run's seed, the round and the vector. Who knows the seed can take the noise off."""

    def draw(name: str, round: int, n: int) -> Tensor:
        return torch.from_numpy(numpy_rng(seed, f"noise {name}", round).standard_normal(n))

    return draw


def from_system(name: str, round: int, n: int) -> Tensor:
    """Draws from the system's cryptographic generator (Box-Muller); they cannot be had again."""
    return torch.from_numpy(np.concatenate([_box_muller(min(_CHUNK, n - at)) for at in range(0, n, _CHUNK)]))


def _box_muller(n: int) -> np.ndarray:
    pairs = -(-n // 2)
    words = np.frombuffer(secrets.token_bytes(16 * pairs), dtype=np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((words[0] + 1.0) * 2.0**-53))  # of uniform values in (0, 1]
    angle = 2 * math.pi * 2.0**-53 * words[1]
    found: np.ndarray = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
    return found


class PrivateMean(WeightedMean):
    """The means and totals of the uploads with noise. It takes the place of the weighted mean.

    clips: largest norm of each vector that is sent. noise: z. draws: where the noise comes from. A client whose upload
    is rejected adds 0, and the denominator stays S. Nothing else of the round is handed on: the number of clients is
    S, and K eta is that of K steps. Raises UserError where clients send more than what `clips` bounds.
    """

    def __init__(
        self,
        alg: Algorithm,
        declared: Declared,
        info: RoundInfo,
        device: torch.device,
        *,
        clips: Mapping[str, float],
        noise: float,
        draws: Draws,
    ) -> None:
        super().__init__(alg, declared, info, device)
        if unbounded := [name for name in declared.sent if name not in clips]:
            raise UserError(
                f"privacy: clients also send {' and '.join(unbounded)}, which is not clipped: the running statistics "
                "of batch norm tell of the clients' samples; set model.norm=group, which has none"
            )
        self._alg, self._info, self._draws = alg, info, draws
        self.deviations = {name: noise * math.sqrt(len(clips)) * clips[name] for name in self.sums}

    def result(self) -> Reduced:
        """The noised means and totals, in x's dtype."""
        info, sums = self._info, {name: total + self._noise(name, total) for name, total in self.sums.items()}
        for name in self._alg.nonnegative:
            if name in sums:
                sums[name].clamp_min_(0.0)
        mean = {n: (s / info.sampled).to(self._dtype) for n, s in sums.items() if n not in self._tracked_names}
        total = {name: sums[name].to(self._dtype) for name in self._tracked_names}
        rate_sum = float(self._alg.rates(torch.tensor([info.local_steps]), info).sum())
        return Reduced(mean, total, rate_sum, info.sampled, info.tracked)

    def noise_ratio(self, name: str) -> float | None:
        """The length of the noise in this vector's sum over that of the sum without it.

        None where that is 0, or no client sends such a vector."""
        if name not in self.sums:
            return None
        norm = float(torch.linalg.vector_norm(self.sums[name]))
        return self.deviations[name] * math.sqrt(len(self.sums[name])) / norm if norm > 0 else None

    def _noise(self, name: str, total: Tensor) -> Tensor | float:
        deviation = self.deviations[name]
        if deviation == 0:
            return 0.0
        return deviation * self._draws(name, self._info.index, len(total)).to(total)


def noise_length(noise: float, clip: float, vectors: int, values: int, sampled: int) -> float:
    """The expected length of the noise in the mean of one vector of `values` numbers, of `vectors` that are sent."""
    return noise * math.sqrt(vectors * values) * clip / sampled
