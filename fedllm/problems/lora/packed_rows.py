"""Rows of several samples each, for models that compute them as they compute rows of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedllm.common.profiling import section
from fedllm.data.pixels import Pixels
from fedllm.data.tokenization import send
from fedllm.problems.lora.micro_batches import MicroBatch, whole
from fedllm.problems.lora.packing import Packed, PackedFormat, attention_window, find_format, pack
from fedllm.problems.lora.padded_rows import PaddedRows
from fedllm.problems.lora.row_layout import DropoutKeys, RowLayout


@dataclass(frozen=True, eq=False)
class PackedRows(RowLayout):
    """Several samples of one client per row. format: how the model reads them. equal: as many rows for every client.
    flat: all samples of all clients in one row instead, without padding."""

    packed = True

    format: PackedFormat = PackedFormat(causal=False, first_position=0)
    equal: bool = False
    flat: bool = False

    def sizes(self, batches: Sequence[np.ndarray]) -> list[int]:
        """Whole rows as long as the longest sample, or the samples alone."""
        if self.flat:
            return [int(self.lengths[batch].sum()) for batch in batches]
        longest = max(int(self.lengths[batch].max()) for batch in batches)
        tokens = [longest * -(-int(self.lengths[batch].sum()) // longest) for batch in batches]
        return [max(tokens)] * len(batches) if self.equal else tokens

    def micro_batches(self, batches: Sequence[np.ndarray]) -> list[MicroBatch]:
        return [whole(batches, self.lengths)]

    def outputs(self, X: Tensor, micro: MicroBatch, keys: DropoutKeys | None) -> Tensor:
        with section("data"):
            drops = None if keys is None else send(keys(micro.slots), X.device)
            assert not isinstance(self.tokens, Pixels), "images are not packed"
            layout = {"equal": self.equal, "flat": self.flat}
            rows = pack(self.tokens, micro.samples.numpy(), self.format, **layout, pad_id=self.pad_id).to(X.device)
        with section("forward"):
            return self.model.packed(X, rows, drops)


@torch.no_grad()
def find_packed_rows(padded: PaddedRows, *, equal: bool, flat: bool, tolerance: float) -> PackedRows | None:
    """The samples of `padded` in packed rows, or None where the model does not compute the same outputs for these.

    equal: see PackedRows. flat: all in one row, where the model can. Tried on some of the samples; see
    packing.find_format for the tolerance.
    """
    model, tokens, pad_id = padded.model, padded.tokens, padded.pad_id
    if isinstance(tokens, Pixels):  # all of one length: nothing is to be gained
        return None
    if padded.lengths.max() > attention_window(model.model):
        return None
    x = model.start[None]

    def padded_outputs(index: Tensor) -> Tensor:
        return model.readout.comparable(padded.outputs_of(x, index))

    def packed_outputs(rows: Packed) -> Tensor:
        return model.readout.comparable(model.packed(x, rows.to(x.device)))

    given = (model.model, tokens, padded_outputs, packed_outputs, tolerance, pad_id)
    if flat and (found := find_format(*given, flat=True)) is not None:
        return PackedRows(model, tokens, pad_id, found, flat=True)
    found = find_format(*given)
    return None if found is None else PackedRows(model, tokens, pad_id, found, equal)
