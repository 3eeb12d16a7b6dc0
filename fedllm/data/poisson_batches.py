"""Chooses the samples of private local steps: each sample of a client by itself, with one probability."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedllm.common.seeding import numpy_rng


@dataclass(frozen=True)
class PoissonBatches:
    """Poisson batches: each of a client's n samples with probability batch_size / n, at most 1, in each step.

    parts: sample indices of each client. seed: the draws depend on (seed, round, client, step) alone; None: they come
    from the system's generator and cannot be had again. A batch may be larger than batch_size, or empty.
    """

    parts: Sequence[np.ndarray]
    batch_size: int
    seed: int | None = None

    def rate(self, client: int) -> float:
        """The probability q with which each of the client's samples is taken in a step."""
        return min(1.0, self.batch_size / len(self.parts[client]))

    def expected(self, client: int) -> int:
        """The expected number of samples of a step."""
        return min(self.batch_size, len(self.parts[client]))

    def indices(self, client: int, round: int, step: int) -> np.ndarray:
        """Sample indices of one step."""
        part = self.parts[client]
        if self.seed is None:
            words = np.frombuffer(secrets.token_bytes(8 * len(part)), dtype=np.uint64)
            values = (words >> np.uint64(11)) * 2.0**-53
        else:
            values = numpy_rng(self.seed, "poisson batches", round, client, step).random(len(part))
        taken: np.ndarray = part[values < self.rate(client)]
        return taken
