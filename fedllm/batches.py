"""Which samples a client takes at which step, and how a cohort's batches are cut so that little of them is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedllm.random import numpy_rng


class ClientBatches:
    """Mini-batches of each client's own samples: a permutation drawn from (seed, round, client, pass), cut in batches.

    parts: sample indices of each client. The last batch of a pass may be smaller. With `steps`, a client that runs out
    of samples starts another pass, so that every client takes exactly that many steps; with `epochs`, it takes as many
    as its passes have batches.
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
        """Local steps of a client in a round."""
        if self._steps is not None:
            return self._steps
        return (self._epochs or 1) * self._per_epoch(client)

    def _per_epoch(self, client: int) -> int:
        return -(-len(self.parts[client]) // self.batch_size)

    def indices(self, client: int, round: int, step: int) -> np.ndarray:
        """Samples of one step, at most batch_size of them."""
        epoch, place = divmod(step, self._per_epoch(client))
        order = self._permutation(client, round, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


@dataclass(frozen=True)
class MicroBatch:
    """The j-th slice of every client's batch. samples, slots [C, m]: dataset index (-1 = padding row) and place in the
    client's own batch; length: tokens of the longest."""

    samples: Tensor
    slots: Tensor
    length: int


def micro_batches(
    batches: Sequence[np.ndarray], lengths: np.ndarray, *, overhead: float, slices: int | None = None
) -> list[MicroBatch]:
    """Cuts the batches of C clients into slices of similar length, rectangular over clients.

    Each client's batch is sorted by length and aligned at its longest sample; slice j holds the same rows of every
    client. lengths: tokens of every sample of the data set. The cuts minimise padded tokens plus `overhead` tokens a
    slice, by dynamic programming; `slices` asks for that many equal ones instead.
    """
    width = max(map(len, batches))
    samples = np.full((len(batches), width), -1)
    slots = np.zeros((len(batches), width), dtype=np.int64)
    for row, batch in enumerate(batches):
        order = np.argsort(lengths[batch], kind="stable")
        samples[row, width - len(batch) :] = batch[order]
        slots[row, width - len(batch) :] = order
    longest = np.where(samples >= 0, lengths[samples], 1).max(axis=0)
    if slices is None:
        cuts = _best_cuts(longest, overhead / len(batches))
    else:
        cuts = sorted({round(width * cut / slices) for cut in range(1, slices + 1)} - {0})
    found, begin = [], 0
    for end in cuts:
        part = torch.from_numpy(samples[:, begin:end]), torch.from_numpy(slots[:, begin:end])
        found.append(MicroBatch(*part, length=int(longest[end - 1])))
        begin = end
    return found


def whole(batches: Sequence[np.ndarray], lengths: np.ndarray) -> MicroBatch:
    """The batches of C clients as one slice, each in its own order, with the padding rows behind it."""
    width = max(map(len, batches))
    samples = np.full((len(batches), width), -1)
    for row, batch in enumerate(batches):
        samples[row, : len(batch)] = batch
    slots = torch.arange(width).expand(samples.shape)
    return MicroBatch(torch.from_numpy(samples), slots, length=int(np.where(samples >= 0, lengths[samples], 1).max()))


def _best_cuts(longest: np.ndarray, overhead: float) -> list[int]:
    """Ends of the slices that minimise sum of rows * longest + overhead; longest [width] rises."""
    width = len(longest)
    cost, last = np.full(width + 1, np.inf), np.zeros(width + 1, dtype=np.int64)
    cost[0] = 0.0
    starts = np.arange(width)
    for end in range(1, width + 1):
        total = cost[:end] + (end - starts[:end]) * longest[end - 1] + overhead
        last[end] = int(total.argmin())
        cost[end] = total[last[end]]
    cuts, end = [], width
    while end:
        cuts.append(end)
        end = int(last[end])
    return cuts[::-1]
