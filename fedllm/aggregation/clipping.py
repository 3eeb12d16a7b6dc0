"""Limits the L2 norm of the vectors that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedllm.aggregation.uploads import Declared, Uploads


@dataclass(frozen=True)
class Clip:
    """Scales a client's vector down where its norm is above `norms[name]`. A vector without a norm stays as it is.

    The client clips, so that it can keep what it sent. The server clips what it reads, which binds clients that do not.
    counting: notes in `uploads.clipped` which clients were scaled down.
    """

    norms: Mapping[str, float]
    counting: bool = False

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        if self.counting and not uploads.clipped:
            uploads.clipped = {name: (row_norms(uploads.sent[name]) > norm)[:, 0] for name, norm in self.norms.items()}
        self._clip(uploads)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        self._clip(uploads)

    def _clip(self, uploads: Uploads) -> None:
        for name, norm in self.norms.items():
            if name in uploads.sent:
                value = uploads.sent[name]
                length = row_norms(value)
                uploads.sent[name] = value * torch.where(length > norm, norm / length, 1.0).to(value.dtype)


def row_norms(rows: Tensor) -> Tensor:
    """The L2 norms [C, 1] of rows [C, n], in float64: in float32, those of 10^7 values are too small by up to 3e-4."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return lengths
