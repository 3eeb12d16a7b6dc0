"""Rows of one sample each, padded to the longest, in slices of samples of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedllm.common.profiling import section
from fedllm.data.pixels import Pixels
from fedllm.data.tokenization import send
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.micro_batches import MicroBatch, micro_batches
from fedllm.problems.lora.row_layout import DropoutKeys, RowLayout

# The fixed cost of a slice, in padded tokens that cost as much, by device.
SLICE_OVERHEAD = {"cpu": 64.0, "cuda": 4096.0}


@dataclass(frozen=True, eq=False)
class PaddedRows(RowLayout):
    """One sample per row. slices: how many equal slices each batch is cut into; None: the cut that costs least."""

    packed = False

    slices: int | None = None

    def sizes(self, batches: Sequence[np.ndarray]) -> list[int]:
        longest = max(int(self.lengths[batch].max()) for batch in batches)
        return [longest * -(-max(map(len, batches)) // (self.slices or 1))] * len(batches)

    def micro_batches(self, batches: Sequence[np.ndarray]) -> list[MicroBatch]:
        overhead = SLICE_OVERHEAD[self.model.start.device.type]
        return micro_batches(batches, self.lengths, overhead=overhead, slices=self.slices)

    def outputs(self, X: Tensor, micro: MicroBatch, keys: DropoutKeys | None) -> Tensor:
        with section("data"):
            drops = None if keys is None else send(keys(micro.slots), X.device)
            real = micro.samples >= 0
            index = torch.where(real, micro.samples, self._shortest).reshape(-1)
            inputs = self._inputs(index, X.device, drops, real.reshape(-1), micro.length)
            learned = self._learned(micro.samples.reshape(-1), micro.length, X.device)
        with section("forward"):
            return self.model(X, inputs, drops, learned)

    def outputs_of(self, X: Tensor, index: Tensor, keys: Tensor | None = None) -> Tensor:
        """Outputs of the head [n, L] for the samples `index` [n], as many for each client, and parameters X [C, d].

        keys [n]: dropout keys of the samples, None for no dropout and no augmentation.
        """
        length = int(self.lengths[index].max())
        learned = self._learned(index, length, X.device)
        return self.model(X, self._inputs(index, X.device, keys, length=length), keys, learned)

    @cached_property
    def _shortest(self) -> int:
        return int(self.lengths.argmin())

    def _learned(self, index: Tensor, length: int, device: torch.device) -> LearnedTokens | None:
        """The learned tokens of the samples [n] (-1: none), each in a row of `length` tokens."""
        found = LearnedTokens.within(self.tokens, index.numpy(), np.arange(len(index)) * length)
        return None if found is None else found.to(device)

    def _inputs(
        self,
        index: Tensor,
        device: torch.device,
        keys: Tensor | None = None,
        real: Tensor | None = None,
        length: int | None = None,
    ) -> dict[str, Tensor]:
        """The model's inputs for these samples; rows that are not `real` attend to their first token only.

        There is no attention mask where all tokens are real, unless the model is causal (see attention_mask.py). Images
        have neither padding nor a mask; they are augmented by the keys, from which their dropout is drawn as well.
        """
        if isinstance(self.tokens, Pixels):
            return {name: send(value, device) for name, value in self.tokens.rows(index, keys).items()}
        inputs = self.tokens.rows(index, length=length, pad_id=self.pad_id)
        mask = inputs["attention_mask"]
        if real is not None:
            mask[~real, 1:] = 0
        if not self.model.causal and bool(mask.all()):
            del inputs["attention_mask"]
        return {name: send(value, device) for name, value in inputs.items()}
