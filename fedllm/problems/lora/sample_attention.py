"""Attention of samples that lie end to end in one row: each sample attends to itself, and nothing is padding.

All but the attention computes token by token and does not need to know where a sample ends. The attention takes the
samples out of the row, in groups of similar lengths, and puts their results back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedllm.data.tokenization import send

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention [n, L, H, h] of q [n, H, L, h] and k, v [n, G, L, h] with a mask that is added to the scores, or None."""


@dataclass(frozen=True)
class SampleGroup:
    """n samples of similar lengths, padded to the longest, of L tokens. mask [n, 1, 1, L]: 0 for tokens that can be
    attended to, -inf for padding; None where there is none, or where a token attends to earlier ones only."""

    count: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class SampleGroups:
    """The samples of a row of T tokens, in groups.

    causal: a token attends to earlier ones only. taken [sum of n * L]: place in the row of each token of the groups;
    padding takes its sample's last token. back [T]: place of each token of the row among the groups' tokens.
    """

    groups: list[SampleGroup]
    causal: bool
    taken: Tensor
    back: Tensor

    @classmethod
    def of(cls, begin: np.ndarray, lengths: np.ndarray, causal: bool) -> SampleGroups:
        """Groups of the samples that begin at the places [N] of the row and have these lengths [N], 0 for none.

        A group's shortest sample is longer than half of its longest.
        """
        real = np.flatnonzero(lengths)
        order = real[np.argsort(-lengths[real], kind="stable")]
        groups, taken = [], []
        back = np.empty(int(lengths.sum()), np.int64)
        first = done = 0
        while done < len(order):
            longest = int(lengths[order[done]])
            members = order[done:][2 * lengths[order[done:]] > longest]
            own = lengths[members, None]
            inside = np.arange(longest) < own
            places = begin[members, None] + np.minimum(np.arange(longest), own - 1)
            back[places[inside]] = first + np.flatnonzero(inside)
            groups.append(SampleGroup(len(members), longest, None if causal else _mask(inside)))
            taken.append(places.reshape(-1))
            first += places.size
            done += len(members)
        return cls(groups, causal, torch.from_numpy(np.concatenate(taken)), torch.from_numpy(back))

    def to(self, device: torch.device) -> SampleGroups:
        """The same groups on `device`."""
        groups = [
            SampleGroup(each.count, each.length, None if each.mask is None else send(each.mask, device))
            for each in self.groups
        ]
        return SampleGroups(groups, self.causal, send(self.taken, device), send(self.back, device))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Attention [1, T, H, h] of a row's q [1, H, T, h] and k, v [1, G, T, h]."""
        parts = zip(self._out_of_row(q), self._out_of_row(k), self._out_of_row(v), self.groups, strict=True)
        found = torch.cat([attend(qs, ks, vs, group.mask).flatten(0, 1) for qs, ks, vs, group in parts])
        return _taken(found, self.back)[None]

    def _out_of_row(self, value: Tensor) -> list[Tensor]:
        """[n, heads, L, h] of each group, for a row's [1, heads, T, h]."""
        tokens = _taken(value[0].transpose(0, 1), self.taken, self.back)
        parts = torch.split(tokens, [each.count * each.length for each in self.groups])
        return [
            part.view(each.count, each.length, *part.shape[1:]).transpose(1, 2)
            for part, each in zip(parts, self.groups, strict=True)
        ]


class _Taken(Function):
    """value[places]. back: where in `places` the only copy of each value is that has a gradient; None where no value is
    taken twice."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, places: Tensor, back: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, back)
        ctx.size = len(value)
        return value[places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        places, back = ctx.saved_tensors
        if back is not None:
            return g[back], None, None
        return g.new_zeros(ctx.size, *g.shape[1:]).index_copy_(0, places, g), None, None


def _taken(value: Tensor, places: Tensor, back: Tensor | None = None) -> Tensor:
    found: Tensor = _Taken.apply(value, places, back)  # type: ignore[no-untyped-call]
    return found


def _mask(inside: np.ndarray) -> Tensor | None:
    """See SampleGroup. inside [n, L]: whether a token is a sample's own."""
    if inside.all():
        return None
    return torch.zeros(inside.shape).masked_fill_(torch.from_numpy(~inside), -torch.inf)[:, None, None]
