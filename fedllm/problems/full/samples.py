"""What training all weights asks of samples: tokens, or others without padding, such as images."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedllm.data.tokenization import Tokens


class WholeSamples(Protocol):
    """n samples without padding, on the CPU. targets [n]. lengths [n]: what the memory of a pass grows with.

    sizes int64 [n]: how many targets the loss of a sample is the sum of.
    """

    @property
    def targets(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def sizes(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def rows(self, indices: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        """The model's inputs for the samples `indices` [m]. keys int32 [m]: what augmentation is drawn from; None for
        none."""
        ...


Samples = Tokens | WholeSamples
