"""Batches of samples as a model's inputs, with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedllm.data.tokenization import Tokens, send
from fedllm.problems.full.learned_places import LearnedPlaces, sums
from fedllm.problems.full.samples import Samples
from fedllm.problems.lora.row_layout import DropoutKeys


@dataclass(frozen=True)
class Batch:
    """m samples: the model's inputs, targets [m], and of a causal language model the places that are read."""

    inputs: dict[str, Tensor]
    targets: Tensor
    places: LearnedPlaces | None = None

    def outputs(self, logits: Tensor) -> Tensor:
        """What the task reads, [m, L] of the model's logits."""
        return logits if self.places is None else sums(logits, self.places.tensors)


@dataclass(frozen=True)
class StackedBatch:
    """C batches of m samples each, every tensor with the clients in front. weight [C, m]: of each sample's loss in its
    client's mean; 0 for one that only fills up."""

    inputs: dict[str, Tensor]
    targets: Tensor
    weight: Tensor
    places: LearnedPlaces | None = None


@dataclass(frozen=True, eq=False)
class BatchReader:
    """Reads batches of these samples. pad_id: the id of padding. causal: whether the model's tokens attend to earlier
    ones only."""

    samples: Samples
    pad_id: int = 0
    causal: bool = False

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample [n]."""
        return self.samples.lengths.numpy()

    def read(
        self,
        indices: np.ndarray,
        device: torch.device,
        keys: DropoutKeys | None = None,
        slots: np.ndarray | None = None,
    ) -> Batch:
        """The samples with these indices [m], on `device`.

        slots [m]: their places in the client's batch. keys: what augmentation is drawn from, None for none.
        """
        index = torch.from_numpy(np.asarray(indices))
        places_in_batch = torch.arange(len(index)) if slots is None else torch.from_numpy(slots)
        inputs = self._rows(index, None if keys is None else keys(places_in_batch[None]))
        places = self._places(index)
        return Batch(
            {name: send(value, device) for name, value in inputs.items()},
            send(self.samples.targets[index], device),
            None if places is None else places.to(device),
        )

    def stack(
        self, batches: Sequence[np.ndarray], device: torch.device, keys: DropoutKeys | None = None
    ) -> StackedBatch:
        """The batches of C clients, smaller ones filled up with their first sample. keys: see `read`."""
        most = max(map(len, batches))
        index = torch.stack([torch.from_numpy(np.pad(b, (0, most - len(b)), constant_values=b[0])) for b in batches])
        real = torch.stack([torch.arange(most) < len(batch) for batch in batches])
        totals = (self.samples.sizes[index] * real).sum(dim=1, keepdim=True)
        slots = torch.arange(most).expand(index.shape)
        inputs = self._branchless(self._rows(index.reshape(-1), None if keys is None else keys(slots)))
        found = [self._places(row) for row in index]
        places = LearnedPlaces.stack([each for each in found if each is not None]) if found[0] is not None else None
        return StackedBatch(
            {name: send(value.view(*index.shape, *value.shape[1:]), device) for name, value in inputs.items()},
            send(self.samples.targets[index], device),
            send(real / totals, device),
            None if places is None else places.to(device),
        )

    def _rows(self, index: Tensor, keys: Tensor | None) -> dict[str, Tensor]:
        if isinstance(self.samples, Tokens):
            return self.samples.rows(index, pad_id=self.pad_id)
        return self.samples.rows(index, keys)

    def _branchless(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs whose attention mask a model takes as it is: looking at it is a branch, which torch.func cannot stack.

        Padding is on the right, where tokens of a causal model do not see it.
        """
        mask = inputs.get("attention_mask")
        if mask is None:
            return inputs
        others = {name: value for name, value in inputs.items() if name != "attention_mask"}
        if self.causal:
            return others
        return others | {"attention_mask": mask[:, None, None].bool().expand(-1, 1, mask.shape[1], -1)}

    def _places(self, index: Tensor) -> LearnedPlaces | None:
        if not isinstance(self.samples, Tokens) or self.samples.learned is None:
            return None
        return LearnedPlaces.of(self.samples, index)
