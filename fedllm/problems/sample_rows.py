"""Single samples of several clients, each a row of its own, cut into passes of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.passes import Passes
from fedllm.problems.lora.row_layout import DropoutKeys

ROW_VECTORS = 3  # vectors of d numbers that a row takes: its parameters, its gradient, and one while it is computed


@dataclass(frozen=True)
class SampleRows:
    """R samples: rows [R] of X that they are computed at, their clients, their indices, and their slots, the places in
    their client's batch."""

    rows: np.ndarray
    clients: np.ndarray
    samples: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[np.ndarray], clients: Sequence[int], lengths: np.ndarray) -> SampleRows:
        """The samples of all clients, the longest first. lengths: tokens of every sample of the data set."""
        counts = [len(each) for each in samples]
        joined = np.concatenate([*samples, np.empty(0, np.int64)]).astype(np.int64)
        rows = np.repeat(np.arange(len(samples)), counts)
        slots = np.concatenate([*(np.arange(count) for count in counts), np.empty(0, np.int64)]).astype(np.int64)
        order = np.argsort(-lengths[joined], kind="stable")
        return cls(rows[order], np.asarray(clients)[rows[order]], joined[order], slots[order])

    def passes(self, lengths: np.ndarray, passes: Passes, dim: int) -> Iterator[SampleRows]:
        """Neighbouring samples that share a pass: as many as its memory has room for, with their vectors [dim]."""
        begin = 0
        while begin < len(self.samples):
            end = begin + most_rows(int(lengths[self.samples[begin]]), passes, dim)
            yield SampleRows(*(value[begin:end] for value in vars(self).values()))
            begin = end

    @property
    def batches(self) -> list[np.ndarray]:
        """Each sample as a batch of its own."""
        return [self.samples[n : n + 1] for n in range(len(self.samples))]

    def keys(self, seed: int, round: int, step: int) -> DropoutKeys:
        """The dropout keys [R] of these samples, at their slots."""

        def found(_: Tensor) -> Tensor:
            return row_keys(seed, round, step, self.clients.tolist(), torch.from_numpy(self.slots)[:, None])

        return found


def row_bytes(length: int, passes: Passes, dim: int) -> float:
    """Bytes that a sample of this length takes of a pass."""
    return length * passes.memory.token + ROW_VECTORS * 4 * dim


def largest_bytes(longest: int, rows: int, passes: Passes, dim: int) -> float:
    """The most bytes that a pass of so many samples of at most this length takes."""
    one = row_bytes(longest, passes, dim)
    return max(one, min(rows * one, passes.tokens * passes.memory.token))


def most_rows(length: int, passes: Passes, dim: int) -> int:
    """How many samples of this length fit into a pass; at least one."""
    room = passes.tokens * passes.memory.token
    return int(min(max(1.0, room / row_bytes(length, passes, dim)), 2**31))
