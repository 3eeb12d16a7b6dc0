"""What travels between a server and its clients, as objects and as bytes, and how a client checks what it receives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from fedllm import parcel
from fedllm.algorithms.base import Algorithm, RoundInfo, State, lengths
from fedllm.errors import UserError
from fedllm.training import under
from fedllm.uploads import fault

Terms = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What the server sends for round `round` (from 0): x [d] and the algorithm's downloads.

    terms: what server and client must have alike, see `terms`; not compared where it is empty. counted: receipt of the
    last upload of this very client that counted, "" for none; None where the server does not say. start: what tells
    this round of this run from every other; an upload gives it back.
    """

    round: int
    x: Tensor
    server: State
    terms: Terms = field(default_factory=dict)
    counted: str | None = None
    start: str = ""

    def to_bytes(self) -> bytes:
        """The broadcast as a safetensors file with a JSON head."""
        head = {"round": self.round, "terms": self.terms, "counted": self.counted, "start": self.start}
        return parcel.pack(head, {"x": self.x, **{f"server/{name}": value for name, value in self.server.items()}})

    @classmethod
    def from_bytes(cls, data: bytes) -> Broadcast:
        """The broadcast again. UserError where it is none; what is in it is checked when a client begins with it."""
        head, tensors = parcel.unpack(data)
        _require_head(cls, head, "x", "server")
        return cls(x=tensors.pop("x", None), server=under("server/", tensors), **head)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Upload(Mapping[str, Tensor]):
    """What a client sends: tensors {name: [1, n]}, for safetensors, and a head of plain numbers, for JSON.

    round: which it trained in. steps: local steps taken. rate_sum: the sum of their rates, the "K eta" of the server's
    formulas. samples: that the client holds, for `weights: size`. tracked: whether the tracked vectors are in it.
    start: the broadcast's, compared where it is not empty.
    Upload(tensors, **head) makes it again; it reads as the mapping `tensors`.
    """

    tensors: State
    round: int
    steps: int
    rate_sum: float
    samples: int
    tracked: bool
    start: str = ""

    @property
    def head(self) -> dict[str, Any]:
        """All but the tensors."""
        return {name: value for name, value in vars(self).items() if name != "tensors"}

    @property
    def receipt(self) -> str:
        """What tells this upload from every other: a digest of its round and tensors."""
        return parcel.digest(str(self.round), self.tensors)

    def to_bytes(self) -> bytes:
        """The upload as a safetensors file with a JSON head."""
        return parcel.pack(self.head, self.tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> Upload:
        """The upload again. UserError where it is none; what is in it is checked by Server.add."""
        head, tensors = parcel.unpack(data)
        _require_head(cls, head, "tensors")
        return cls(tensors, **head)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _require_head(cls: type[Broadcast] | type[Upload], head: Mapping[str, Any], *tensors: str) -> None:
    expected = {each.name for each in fields(cls)} - set(tensors)
    if set(head) != expected:
        raise UserError(f"found a head with {sorted(head)}, expected {sorted(expected)}, as {cls.__name__} has it")


def terms(algorithm: Algorithm, info: RoundInfo) -> Terms:
    """What a server and its clients must have alike, in JSON's own types: algorithm, settings, federation, model."""
    found = {
        "algorithm": type(algorithm).__name__,
        **{f"algorithm.{name}": value for name, value in asdict(algorithm).items()},
        "rounds": info.total,
        "num_clients": info.num_clients,
        "sampled": info.sampled,
        "tracked": info.tracked,
        "local_steps": info.local_steps,
        "model": info.model,
    }
    plain: Terms = json.loads(json.dumps(found, default=str))
    return plain


def disagreement(theirs: Terms, ours: Terms) -> str | None:
    """The first of the terms in which the two differ, in words; None where they agree, or one does not say."""
    for name, value in ours.items():
        found = theirs.get(name)
        if name == "model" and found and value and found != value:
            return (
                f"model: found {found}, expected {value}: another base, other adapters, or frozen weights that each "
                "site drew for itself, such as a pooler that the checkpoint lacks"
            )
        if name != "model" and name in theirs and found != value:
            return f"{name}: found {found!r}, expected {value!r}"
    return None


def check_broadcast(broadcast: Broadcast, x: Tensor, algorithm: Algorithm, info: RoundInfo) -> None:
    """UserError unless the broadcast is of a round of the run, on these terms, and has x and the downloads as the model
    needs them."""
    if not isinstance(broadcast.round, int) or not 0 <= broadcast.round < info.total:
        raise UserError(
            f"broadcast round: found {broadcast.round}, expected 0 to {info.total - 1}, the rounds of the run"
        )
    if why := disagreement(broadcast.terms, terms(algorithm, info)):
        raise UserError(
            f"broadcast of round {broadcast.round}: {why}; give the server and this client the same load_algorithm "
            "and model_info"
        )
    unused = algorithm.server_vectors().keys() - algorithm.downloads().keys()  # may come along, and is not looked at
    found = {"x": broadcast.x} | {name: value for name, value in broadcast.server.items() if name not in unused}
    expected = {"x": len(x)} | lengths(algorithm.downloads(), x, info)
    if why := fault(found, expected, x.dtype):
        raise UserError(
            f"broadcast of round {broadcast.round}: {why}; send what Server.broadcast() gives, of a "
            "Server that was made with this client's info"
        )
