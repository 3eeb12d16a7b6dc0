"""Chooses the samples of each client's local steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fedllm.common.seeding import numpy_rng


class ClientBatches:
    """Mini-batches of each client's own samples: a permutation drawn from (seed, round, client, epoch), cut in batches.

    parts: sample indices of each client. The last batch of an epoch may be smaller. With `steps`, every client takes
    exactly that many steps and begins another epoch when its samples are used up. With `epochs`, a client takes all
    batches of that many epochs.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], *, batch_size: int, epochs: int | None, steps: int | None, seed: int
    ) -> None:
        self.parts, self.batch_size, self.seed = parts, batch_size, seed
        self._epochs, self._steps = epochs, steps
        self._permutation = lru_cache(maxsize=1024)(self._draw)

    def _draw(self, client: int, round: int, epoch: int) -> np.ndarray:
        return numpy_rng(self.seed, "batches", round, client, epoch).permutation(self.parts[client])

    def steps(self, client: int) -> int:
        """The number of local steps of a client in a round."""
        if self._steps is not None:
            return self._steps
        return (self._epochs or 1) * self._per_epoch(client)

    def _per_epoch(self, client: int) -> int:
        return -(-len(self.parts[client]) // self.batch_size)

    def indices(self, client: int, round: int, step: int) -> np.ndarray:
        """Sample indices of one step, at most batch_size of them."""
        epoch, place = divmod(step, self._per_epoch(client))
        order = self._permutation(client, round, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size]
