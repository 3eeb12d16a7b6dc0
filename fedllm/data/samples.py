"""What a problem asks of the samples that it trains on: tokens, pixels, or others."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Samples(Protocol):
    """n samples on the CPU. targets [n]. lengths [n]: tokens, or whatever the memory of a pass grows with.

    sizes int64 [n]: how many targets the loss of a sample is the sum of.
    """

    @property
    def targets(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def sizes(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def rows(self, indices: Tensor, length: int | None = None, pad_id: int = 0) -> dict[str, Tensor]:
        """The model's inputs for the samples `indices` [m], padded on the right to `length` where they have lengths."""
        ...
