"""Limits the L2 norm of the vectors that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import clip


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
            uploads.clipped = {
                name: torch.linalg.vector_norm(uploads.sent[name], dim=1) > norm for name, norm in self.norms.items()
            }
        self._clip(uploads)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        self._clip(uploads)

    def _clip(self, uploads: Uploads) -> None:
        for name, norm in self.norms.items():
            if name in uploads.sent:
                uploads.sent[name] = clip(uploads.sent[name], norm)
