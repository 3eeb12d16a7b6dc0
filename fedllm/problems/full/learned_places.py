"""The places of a causal language model's logits that are read: those before each learned token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedllm.data.tokenization import Tokens, send


@dataclass(frozen=True)
class LearnedPlaces:
    """P places in the logits [m, L, V] of a batch. row, place, target int64 [P]: logits[row, place] predict `target`.

    real bool [P]: False for places that only fill up. All may have dimensions of clients in front, see `stack`.
    """

    row: Tensor
    place: Tensor
    target: Tensor
    real: Tensor

    @classmethod
    def of(cls, tokens: Tokens, index: Tensor) -> LearnedPlaces:
        """The learned tokens of the samples `index` [m]."""
        assert tokens.learned is not None, "these samples have no learned tokens"
        start, end = tokens.offsets[index], tokens.offsets[index + 1]
        place = start[:, None] + torch.arange(int((end - start).max()))
        real = place < end[:, None]
        row, column = (tokens.learned[place.where(real, 0)] & real).nonzero(as_tuple=True)
        target = tokens.input_ids[place[row, column]].long()
        return cls(row, column - 1, target, torch.ones_like(row, dtype=torch.bool))

    @classmethod
    def stack(cls, found: list[LearnedPlaces]) -> LearnedPlaces:
        """Those of C batches as [C, P], filled up to the most."""
        most = max(len(each.row) for each in found)
        padded = [[F.pad(value, (0, most - len(value))) for value in each.tensors] for each in found]
        return cls(*(torch.stack(values) for values in zip(*padded, strict=True)))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields in their order."""
        return self.row, self.place, self.target, self.real

    def to(self, device: torch.device) -> LearnedPlaces:
        """The same on `device`."""
        return replace(self, **{name: send(value, device) for name, value in vars(self).items()})


def sums(logits: Tensor, places: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Sums [m, 4] of each sample: negative log-likelihood, learned tokens, right tokens, and 1 if all are right.

    logits [m, L, V]. places: LearnedPlaces.tensors. A token is right if it is the likeliest.
    """
    row, place, target, real = places
    read = logits[row, place]
    losses = F.cross_entropy(read, target, reduction="none")
    right = (read.argmax(dim=1) == target).to(losses)
    return summed(losses, right, row, real, len(logits))


def summed(losses: Tensor, right: Tensor, row: Tensor, real: Tensor, samples: int) -> Tensor:
    """Sums [m, 4] of m samples, see `sums`, of the losses [P] and the right tokens [P] of LearnedPlaces."""
    terms = torch.stack([losses, torch.ones_like(right), right], dim=1) * real[:, None]
    found = terms.new_zeros(samples, 3).index_add(0, row, terms)
    return torch.cat([found, (found[:, 2:] == found[:, 1:2]).to(found)], dim=1)
