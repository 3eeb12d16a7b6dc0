"""How the batches of clients trained together are cut so that little of each part is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The same slice of every client's batch.

    samples [C, m]: indices into the data set, -1 for none. slots [C, m]: places in the client's own batch. length:
    tokens of the longest sample.
    """

    samples: Tensor
    slots: Tensor
    length: int


def micro_batches(
    batches: Sequence[np.ndarray], lengths: np.ndarray, *, overhead: float, slices: int | None = None
) -> list[MicroBatch]:
    """Cuts the batches of C clients into slices of similar length, rectangular over clients.

    Each client's batch is sorted by length and aligned at its longest sample; each slice holds the same places of every
    client. lengths: tokens of every sample of the data set. The cuts minimise padded tokens plus `overhead` tokens per
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
    """The batches of C clients as one slice, each in its own order, with missing samples at the end."""
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
