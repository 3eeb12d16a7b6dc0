"""The vectors that clients send and keep at the end of a round, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm, RoundInfo, lengths
from fedllm.common.tensors import State


@dataclass(frozen=True)
class Declared:
    """The vectors that an algorithm declares, by name, each with its number of values; all have the dtype of x.

    sent: what clients send, including what only tracked clients send. kept: what clients keep between rounds.
    tracked: what only tracked clients send, each the change of the vector of the same name that they keep.
    of_algorithm: what the algorithm sends, without a problem's buffers.
    """

    sent: dict[str, int]
    kept: dict[str, int]
    dtype: torch.dtype
    tracked: tuple[str, ...] = ()
    of_algorithm: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of the vectors that are changes: of x, and of tracked vectors."""
        return ("d", *self.tracked)

    @classmethod
    def by(cls, alg: Algorithm, x: Tensor, info: RoundInfo) -> Declared:
        """The declarations of `alg` for a model x [d] or [C, d]."""
        sent = lengths({**alg.uploads(), **alg.tracked_uploads()}, x, info)
        tracked = tuple(alg.tracked_uploads())
        return cls(sent, lengths(alg.client_vectors(), x, info), x.dtype, tracked, tuple(sent))


@dataclass
class Uploads:
    """The uploads of C clients.

    sent {name: [C, length]}. kept {name: [C, length]}: what the clients keep if their uploads are accepted.
    before {name: [C, length]}: what they kept before the round. clients: their numbers, in the order of the rows.
    round: from 0. rejected: row -> the reason why that client's upload is not accepted. encoded: name -> what travels
    in the place of `sent[name]`, see compression.encode. clipped: name -> [C], whether the client scaled it down.
    """

    sent: State
    kept: State
    before: State = field(default_factory=dict)
    clients: Sequence[int] = ()
    round: int = 0
    rejected: dict[int, str] = field(default_factory=dict)
    encoded: dict[str, State] = field(default_factory=dict)
    clipped: State = field(default_factory=dict)

    def accepted(self, rows: int) -> list[int]:
        """The accepted ones of the rows 0 to rows - 1."""
        return [row for row in range(rows) if row not in self.rejected]
