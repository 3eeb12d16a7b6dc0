"""The steps between `Algorithm.end` on a client and `Algorithm.aggregate` on the server.

    client   end, then `send` of every step, in order
    server   `receive` of every step, in reverse order, then the reduction of the accepted rows, then aggregate

A step clips, rounds or checks uploads. The steps are the same in a simulation, with several processes and on real
sites. What a client keeps must match what it sent: KeepWhatWasSent comes after the steps that change `sent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from fedllm.aggregation.clipping import Clip
from fedllm.aggregation.compression import Rounding, format_of, from_wire, sent_bytes, to_wire
from fedllm.aggregation.reduction import WeightedMean
from fedllm.aggregation.settings import PLAIN, UploadsSettings
from fedllm.aggregation.upload_checks import faults
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.common.tensors import State


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
class KeepWhatWasSent:
    """Sets what the clients keep to what belongs to the clipped and rounded uploads, see Algorithm.keep."""

    algorithm: Algorithm

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        uploads.kept = uploads.kept | self.algorithm.keep(uploads.kept, uploads.before, uploads.sent)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The server keeps nothing of a client."""


@dataclass(frozen=True)
class Pipeline:
    """The steps on uploads, in the client's order, and the reduction of the accepted uploads.

    settings: those that the steps follow.
    """

    steps: tuple[UploadStep, ...] = (FiniteCheck(),)
    reduction: Callable[[Algorithm, Declared, RoundInfo, torch.device], WeightedMean] = WeightedMean
    settings: UploadsSettings = PLAIN

    @classmethod
    def of(cls, settings: UploadsSettings, algorithm: Algorithm, seed: int) -> Pipeline:
        """The pipeline of a recipe. seed: run.seed. Raises UserError for a norm of a vector that is not sent."""
        if settings == PLAIN:
            return cls()
        steps: list[UploadStep] = []
        clipping = Clip(settings.norms(algorithm))
        steps += [clipping] if clipping.norms else []
        if settings.bits != "float32":
            steps += [Rounding(settings.bits, seed)]
            steps += [clipping] if clipping.norms else []  # rounding may lengthen a vector
        return cls((FiniteCheck(), *steps, KeepWhatWasSent(algorithm)), settings=settings)

    def wire(self, uploads: Uploads, names: Iterable[str]) -> State:
        """The tensors that travel for the vectors `names` of one client, after `send`."""
        return to_wire(uploads, names)

    def read(self, found: State, declared: Declared) -> State | str:
        """The vectors {name: [1, n]} that one client's tensors stand for, or what is wrong with the tensors."""
        return from_wire(found, self.settings.bits, declared)

    def bytes(self, name: str, values: int, itemsize: int, declared: Declared) -> int:
        """Bytes that a client's vector of this name and number of values takes where it travels."""
        return sent_bytes(values, format_of(name, self.settings.bits, declared), itemsize)

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The clients' part of all steps."""
        for step in self.steps:
            step.send(uploads, declared, rows)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The server's part of all steps."""
        for step in reversed(self.steps):
            step.receive(uploads, declared, rows)
