"""The steps between `Algorithm.end` on a client and `Algorithm.aggregate` on the server.

    client   end, then `send` of every step, in order
    server   `receive` of every step, in reverse order, then the reduction of the accepted rows, then aggregate

A step clips, rounds, encodes, masks or checks uploads. What it encodes in `send`, it decodes in `receive`. The steps
are the same in a simulation, with several processes and on real sites. Algorithms do not know them. The vectors that a
client keeps must match those that it sent: a step that changes `sent` must change `kept` too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from fedllm.aggregation.reduction import WeightedMean
from fedllm.aggregation.upload_checks import faults
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm


class UploadStep(Protocol):
    """One step on uploads, with a part for the client and a part for the server. Both change `uploads` in place."""

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The client's part, on the uploads of `rows` clients."""

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The server's part. It may reject rows."""


class FiniteCheck:
    """Rejects clients whose vectors have other names, shapes or dtypes than declared, or values that are not finite."""

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """Checks the vectors that the clients keep. The server never sees them."""
        uploads.rejected |= faults(uploads.kept, declared.kept, declared.dtype, rows)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """Checks the vectors that the clients send."""
        uploads.rejected |= faults(uploads.sent, declared.sent, declared.dtype, rows)


@dataclass(frozen=True)
class Pipeline:
    """The steps on uploads, in the client's order, and the reduction of the accepted uploads."""

    steps: tuple[UploadStep, ...] = (FiniteCheck(),)
    reduction: Callable[[Algorithm, Declared, torch.device], WeightedMean] = WeightedMean

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The clients' part of all steps."""
        for step in self.steps:
            step.send(uploads, declared, rows)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The server's part of all steps."""
        for step in reversed(self.steps):
            step.receive(uploads, declared, rows)
