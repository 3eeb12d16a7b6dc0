"""The messages between a server and its clients, as objects and as bytes, and a client's check of a broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from fedllm.aggregation.downloads import travel_dtype
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import EXACT, PLAIN, DownloadsSettings, UploadsSettings
from fedllm.aggregation.upload_checks import fault
from fedllm.algorithms.base import Algorithm, RoundInfo, lengths
from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, under
from fedllm.federation.turns import Turn

Terms = dict[str, Any]
_BROADCAST_HEAD: dict[str, tuple[type, ...]] = {
    "round": (int,),
    "terms": (dict,),
    "counted": (str, type(None)),
    "start": (str,),
}
_SHOWN = 300  # characters of a message's value that an error shows at most


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The server's message for round `round` (from 0): x [d] and the algorithm's downloads.

    terms: the settings that must be equal on server and client, see `terms`; not compared if empty. counted: receipt of
    the receiving client's last upload that counted; "" if none did, None if the server does not say. start: a digest
    that identifies this round of this run; the client copies it into its upload.
    """

    round: int
    x: Tensor
    server: State
    terms: Terms = field(default_factory=dict)
    counted: str | None = None
    start: str = ""

    def to_bytes(self) -> bytes:
        """Encodes the broadcast as a safetensors file with a JSON head."""
        return tensor_file.pack(*self.packed())

    def packed(self) -> tuple[dict[str, Any], State]:
        """The broadcast as plain values and tensors by name."""
        head = {"round": self.round, "terms": self.terms, "counted": self.counted, "start": self.start}
        return head, {"x": self.x, **{f"server/{name}": value for name, value in self.server.items()}}

    @classmethod
    def from_bytes(cls, data: bytes) -> Broadcast:
        """Decodes a broadcast. Raises UserError if the bytes are none. A client checks the content in `begin`."""
        return cls.unpacked(*tensor_file.unpack(data))

    @classmethod
    def unpacked(cls, head: dict[str, Any], tensors: State) -> Broadcast:
        """The broadcast of what `packed` gives. Raises UserError if these are none."""
        _require_head(cls, head, "x", "server")
        for name, kinds in _BROADCAST_HEAD.items():
            if type(head[name]) not in kinds:
                raise UserError(f"broadcast {name}: found {type(head[name]).__name__}, expected {kinds[0].__name__}")
        return cls(x=tensors.pop("x", None), server=under("server/", tensors), **head)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Upload(Mapping[str, Tensor]):
    """A client's message: tensors {name: [1, n]}, stored as safetensors, and a head of plain values, stored as JSON.

    round: the round it belongs to, from 0. steps: local steps taken. rate_sum: the sum of their learning rates, the
    "K eta" of the server's formulas. samples: number of samples that the client holds, for `weights: size`. tracked:
    whether it contains the tracked vectors. start: copied from the broadcast; not compared if empty.
    An Upload is a mapping over `tensors`. Upload(tensors, **head) builds an equal one.
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
        """All fields except the tensors."""
        return {name: value for name, value in vars(self).items() if name != "tensors"}

    @property
    def receipt(self) -> str:
        """A digest of the round and the tensors, which identifies this upload."""
        return tensor_file.digest(str(self.round), self.tensors)

    def to_bytes(self) -> bytes:
        """Encodes the upload as a safetensors file with a JSON head."""
        return tensor_file.pack(self.head, self.tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> Upload:
        """Decodes an upload. Raises UserError if the bytes are none. Server.add checks the content."""
        return cls.unpacked(*tensor_file.unpack(data))

    @classmethod
    def unpacked(cls, head: dict[str, Any], tensors: State) -> Upload:
        """The upload of this head and these tensors. Raises UserError if the head is none."""
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


def terms(
    algorithm: Algorithm,
    info: RoundInfo,
    uploads: UploadsSettings = PLAIN,
    downloads: DownloadsSettings = EXACT,
) -> Terms:
    """The values that must be equal on server and clients, in JSON types: algorithm, settings, federation, model, and
    what happens to uploads and downloads."""
    found = {
        "algorithm": type(algorithm).__name__,
        **{f"algorithm.{name}": value for name, value in asdict(algorithm).items()},
        "rounds": info.total,
        "num_clients": info.num_clients,
        "sampled": info.sampled,
        "tracked": info.tracked,
        "local_steps": info.local_steps,
        "turns": info.turns,
        "model": info.model,
        **{f"uploads.{name}": value for name, value in asdict(uploads).items()},
        **{f"downloads.{name}": value for name, value in asdict(downloads).items()},
    }
    plain: Terms = json.loads(json.dumps(found, default=str))
    return plain


def privacy_terms(privacy: PrivacySettings | None) -> Terms:
    """The term for the noise that the server adds. A client that asks for none compares nothing."""
    return {"privacy": None if privacy is None else {"level": privacy.level, "noise": privacy.noise}}


def disagreement(theirs: Terms, ours: Terms) -> str | None:
    """Describes the first term that differs; None if all agree. A term that one side lacks is not compared, but for
    privacy: a side that asks for it refuses one that says nothing of it."""
    for name, value in ours.items():
        found = theirs.get(name)
        if name == "model" and found and value and found != value:
            return (
                f"model: found {_cut(str(found))}, expected {value}: another base, other adapters, or frozen weights "
                "that each site drew for itself, such as a pooler that the checkpoint lacks"
            )
        if name != "model" and (name in theirs or name == "privacy") and found != value:
            return f"{name}: found {_cut(repr(found))}, expected {value!r}"
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_broadcast(
    broadcast: Broadcast,
    x: Tensor,
    algorithm: Algorithm,
    info: RoundInfo,
    beside: Mapping[str, int] | None = None,
    uploads: UploadsSettings = PLAIN,
    downloads: DownloadsSettings = EXACT,
    privacy: PrivacySettings | None = None,
    turn: Turn | None = None,
) -> None:
    """Raises UserError unless the broadcast's round is in the run, its terms agree, and x and the downloads fit the
    model's size and the format of `downloads`. beside: other vectors that it must have, with their numbers of values,
    in the model's dtype. privacy: what the client asks for, None where it does not compare it. turn: what the
    round trains; the downloads are its part."""
    if not isinstance(broadcast.round, int) or not 0 <= broadcast.round < info.total:
        raise UserError(
            f"broadcast round: found {broadcast.round}, expected 0 to {info.total - 1}, the rounds of the run"
        )
    asked = {} if privacy is None else privacy_terms(privacy)
    if why := disagreement(broadcast.terms, terms(algorithm, info, uploads, downloads) | asked):
        raise UserError(
            f"broadcast of round {broadcast.round}: {why}; give the server and this client the same load_algorithm "
            "and model_info"
        )
    unused = algorithm.server_vectors().keys() - algorithm.downloads().keys()  # allowed in a broadcast, and ignored
    found = {"x": broadcast.x} | {name: value for name, value in broadcast.server.items() if name not in unused}
    part, seen = (x, info) if turn is None else (turn.take(x), turn.facts(info))
    expected = {"x": len(x)} | lengths(algorithm.downloads(), part, seen)
    other = {name: found.pop(name) for name in beside or () if name in found}
    if why := fault(found, expected, travel_dtype(x.dtype, downloads)) or fault(other, beside or {}, x.dtype):
        raise UserError(
            f"broadcast of round {broadcast.round}: {why}; send what Server.broadcast() gives, of a "
            "Server with this client's info"
        )
