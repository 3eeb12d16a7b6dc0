"""What travels between a server and its clients, and how a client checks what it receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedllm.algorithms.base import Algorithm, RoundInfo, State, lengths
from fedllm.errors import UserError
from fedllm.uploads import fault


@dataclass(frozen=True)
class Broadcast:
    """What the server sends for round `round` (from 0): x [d] and the algorithm's downloads."""

    round: int
    x: Tensor
    server: State


@dataclass(frozen=True, eq=False)
class Upload(Mapping[str, Tensor]):
    """What a client sends: tensors {name: [1, n]}, for safetensors, and a head of plain numbers, for JSON.

    round: which it trained in. steps: local steps taken. rate_sum: the sum of their rates, the "K eta" of the server's
    formulas. samples: that the client holds, for `weights: size`. tracked: whether the tracked vectors are in it.
    Upload(tensors, **head) makes it again; it reads as the mapping `tensors`.
    """

    tensors: State
    round: int
    steps: int
    rate_sum: float
    samples: int
    tracked: bool

    @property
    def head(self) -> dict[str, Any]:
        """All but the tensors."""
        return {name: value for name, value in vars(self).items() if name != "tensors"}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def check_broadcast(broadcast: Broadcast, x: Tensor, algorithm: Algorithm, info: RoundInfo) -> None:
    """UserError unless the broadcast is of a round of the run and has x and the downloads as the model needs them."""
    if not isinstance(broadcast.round, int) or not 0 <= broadcast.round < info.total:
        raise UserError(
            f"broadcast round: found {broadcast.round}, expected 0 to {info.total - 1}, the rounds of the run"
        )
    unused = algorithm.server_vectors().keys() - algorithm.downloads().keys()  # may come along, and is not looked at
    found = {"x": broadcast.x} | {name: value for name, value in broadcast.server.items() if name not in unused}
    expected = {"x": len(x)} | lengths(algorithm.downloads(), x, info)
    if why := fault(found, expected, x.dtype):
        raise UserError(
            f"broadcast of round {broadcast.round}: {why}; send what Server.broadcast() gives, of a "
            "Server that was made with this client's info"
        )
