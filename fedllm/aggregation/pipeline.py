"""The steps between `Algorithm.end` on a client and `Algorithm.aggregate` on the server.

    client   end, then `send` of every step, in order
    server   `receive` of every step, in reverse order, then the reduction of the accepted rows, then aggregate

A step clips, rounds or checks uploads. The steps are the same in a simulation, with several processes and on real
sites. What a client keeps must match what it sent: KeepWhatWasSent comes after the steps that change `sent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fedllm.aggregation.base import Reduction
from fedllm.aggregation.clipping import Clip
from fedllm.aggregation.compression import Rounding, format_of, from_wire, sent_bytes, to_wire
from fedllm.aggregation.privacy import Draws, PrivateMean, seeded
from fedllm.aggregation.privacy_checks import require_bounded
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.reduction import WeightedMean
from fedllm.aggregation.row_reduction import RowReduction
from fedllm.aggregation.settings import MEAN, PLAIN, RobustSettings, UploadsSettings
from fedllm.aggregation.upload_checks import faults
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.common.errors import UserError
from fedllm.common.tensors import State

MakeReduction = Callable[[Algorithm, Declared, RoundInfo, torch.device], Reduction]


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
    reduction: MakeReduction = WeightedMean
    settings: UploadsSettings = PLAIN

    @classmethod
    def of(
        cls,
        settings: UploadsSettings,
        algorithm: Algorithm,
        seed: int,
        robust: RobustSettings = MEAN,
        privacy: PrivacySettings | None = None,
        draws: Draws | None = None,
    ) -> Pipeline:
        """The pipeline of a recipe. seed: run.seed. draws: where the noise comes from, by default the seed.

        Raises UserError for a norm of a vector that is not sent, for a robust rule that does not fit the algorithm, and
        for what client-level privacy cannot cover."""
        if why := robust.misfit(algorithm, None):
            raise UserError(why)
        private = _private_mean(settings, algorithm, privacy, draws or seeded(seed))
        if private is not None and robust != MEAN:
            raise UserError("privacy: found with robust: no epsilon is known for its rules; leave one of the two out")
        reduction = private or (WeightedMean if robust == MEAN else partial(RowReduction, robust))
        if settings == PLAIN:
            return cls(reduction=reduction)
        steps: list[UploadStep] = []
        clipping = Clip(settings.norms(algorithm), counting=private is not None)
        steps += [clipping] if clipping.norms else []
        if settings.bits != "float32":
            steps += [Rounding(settings.bits, seed)]
            steps += [clipping] if clipping.norms else []  # rounding may lengthen a vector
        return cls((FiniteCheck(), *steps, KeepWhatWasSent(algorithm)), reduction, settings)

    @property
    def private(self) -> bool:
        """Whether the reduction adds the noise of client-level privacy."""
        return isinstance(self.reduction, partial) and self.reduction.func is PrivateMean

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


def _private_mean(
    uploads: UploadsSettings, algorithm: Algorithm, privacy: PrivacySettings | None, draws: Draws
) -> MakeReduction | None:
    """The reduction that adds the noise of client-level privacy; None without it."""
    if privacy is None or privacy.level != "client":
        return None
    clips = require_bounded(algorithm, uploads)
    if privacy.noise is None:
        raise UserError("privacy.noise: missing; fedllm.aggregation.accounting.noise_for finds it for an epsilon")
    return partial(PrivateMean, clips=clips, noise=privacy.noise, draws=draws)
