"""How the samples of clients trained together are laid out in rows of tokens: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedllm.data.samples import Samples
from fedllm.problems.lora.micro_batches import MicroBatch
from fedllm.problems.lora.stacked_model import StackedModel

DropoutKeys = Callable[[Tensor], Tensor]
"""Dropout keys [C * m] for places [C, m] in the clients' own batches; see dropout.row_keys."""


@dataclass(frozen=True, eq=False)
class RowLayout(ABC):
    """A way to lay out samples in rows. tokens: the samples, texts or images. pad_id: the id of padding.

    A batch is the indices of one client's samples. packed: whether a row may hold several samples.
    """

    packed: ClassVar[bool]

    model: StackedModel
    tokens: Samples
    pad_id: int = 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample [n]."""
        return self.tokens.lengths.numpy()

    @abstractmethod
    def sizes(self, batches: Sequence[np.ndarray]) -> list[int]:
        """Tokens that each client's batch takes of a pass, most of its padding included."""

    @abstractmethod
    def micro_batches(self, batches: Sequence[np.ndarray]) -> list[MicroBatch]:
        """The batches of C clients cut into the parts that are computed one after the other."""

    @abstractmethod
    def outputs(self, X: Tensor, micro: MicroBatch, keys: DropoutKeys | None) -> Tensor:
        """Outputs of the head [C * m, L] in float32 for a micro-batch and parameters X [C, d]; differentiable in X.

        Those of missing samples have no meaning. keys: None for no dropout.
        """
