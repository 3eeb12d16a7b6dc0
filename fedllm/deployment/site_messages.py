"""What `fedllm serve` and its sites say to each other beside a Broadcast: announcement, orders and answers.

Each message is a safetensors file with a JSON head, as tensor_file packs it; nothing in one is executed. An order is
read by a site, an answer by the server. An answer to any order may be a Failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.deployment.message_checks import (
    MOST_TEXT,
    Check,
    is_bool,
    is_count,
    is_object,
    is_run,
    is_score,
    is_scores,
    is_seconds,
    is_sections,
    is_sites,
    is_size,
    is_text,
    is_texts,
    is_versions,
    open_message,
)
from fedllm.deployment.messages import Broadcast, Upload

HEAD_BYTES = 1 << 20  # most bytes of a message without tensors


@dataclass(frozen=True)
class Announcement:
    """What a site must know of a run before it can train: server to site.

    run: 32 hex digits that name the run. site: the site's number, 0 to sites - 1. recipe: the server's, section by
    section, null for one that is null. classes: their names by id, () where labels are none. version: of fedllm.
    """

    run: str
    site: int
    sites: int
    recipe: dict[str, dict[str, Any] | None]
    classes: tuple[str, ...]
    version: str

    def to_bytes(self) -> bytes:
        return tensor_file.pack({"says": "announce", **vars(self)}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Announcement:
        """Raises UserError if the bytes are no announcement. What the recipe says is checked when it is read."""
        head, _ = open_message(data, "announce", _ANNOUNCED)
        return cls(**{**head, "classes": tuple(head["classes"])})


@dataclass(frozen=True)
class TrainOrder:
    """A round's work for one site: server to site. tracked: whether it is one of the round's tracked clients."""

    run: str
    broadcast: Broadcast
    tracked: bool

    def to_bytes(self) -> bytes:
        message, tensors = self.broadcast.packed()
        return tensor_file.pack({"says": "train", "run": self.run, "tracked": self.tracked, **message}, tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainOrder:
        """Raises UserError if the bytes are no order. The site checks the broadcast's content."""
        head, tensors = open_message(data, "train", {"run": is_run, "tracked": is_bool} | _BROADCAST)
        run, tracked = head.pop("run"), head.pop("tracked")
        return cls(run, Broadcast.unpacked(head, tensors), tracked)


@dataclass(frozen=True, eq=False)
class EvaluateOrder:
    """Asks for the scores of x [d] on a site's own validation samples: server to site. buffers [b]: or None."""

    run: str
    round: int
    x: Tensor
    buffers: Tensor | None = None

    def to_bytes(self) -> bytes:
        beside = {} if self.buffers is None else {"buffers": self.buffers}
        return tensor_file.pack({"says": "evaluate", "run": self.run, "round": self.round}, {"x": self.x, **beside})

    @classmethod
    def from_bytes(cls, data: bytes) -> EvaluateOrder:
        """Raises UserError if the bytes are no order. The site checks the tensors' shapes."""
        head, tensors = open_message(data, "evaluate", {"run": is_run, "round": is_count})
        if not {"x"} <= tensors.keys() <= {"x", "buffers"}:
            raise UserError(f"found tensors {sorted(tensors)}, expected x, and buffers where the model has batch norm")
        return cls(head["run"], head["round"], tensors["x"], tensors.get("buffers"))


@dataclass(frozen=True)
class Failure:
    """Why a site did not do what it was asked. whose: whose mistake it is. again: whether to announce the run again,
    because this process of the site has not heard of it."""

    error: str
    whose: Literal["site", "server"]
    again: bool = False

    def to_bytes(self) -> bytes:
        return tensor_file.pack({**vars(self), "error": self.error[:MOST_TEXT]}, {})


@dataclass(frozen=True)
class Joined:
    """A site takes part. samples: of training. validation: samples on which it evaluates, 0 for none. name: its own.
    versions: of fedllm, torch and others. device: where it computes."""

    name: str
    samples: int
    validation: int
    device: str
    versions: dict[str, str]

    def to_bytes(self) -> bytes:
        return tensor_file.pack({"says": "joined", **vars(self)}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Joined:
        """Raises UserError if the bytes are none."""
        head, _ = open_message(data, "joined", _JOINED)
        return cls(**head)


@dataclass(frozen=True, eq=False)
class TrainAnswer:
    """A site's upload. loss: the mean of its local steps. seconds: of its local steps."""

    upload: Upload
    loss: float | None
    seconds: float

    def to_bytes(self) -> bytes:
        head = {"says": "trained", "loss": self.loss, "seconds": self.seconds, "upload": self.upload.head}
        return tensor_file.pack(head, self.upload.tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainAnswer:
        """Raises UserError if the bytes are none. Server.add checks the upload."""
        kinds = {"loss": is_score, "seconds": is_seconds, "upload": is_object}
        head, tensors = open_message(data, "trained", kinds)
        return cls(Upload.unpacked(head["upload"], tensors), head["loss"], head["seconds"])


@dataclass(frozen=True)
class Scores:
    """A site's scores on its own validation samples, by name; None for one that is not finite. Without samples, {}."""

    round: int
    samples: int
    scores: dict[str, float | None] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return tensor_file.pack({"says": "scores", **vars(self)}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Scores:
        """Raises UserError if the bytes are none."""
        head, _ = open_message(data, "scores", {"round": is_count, "samples": is_count, "scores": is_scores})
        return cls(**head)


@dataclass(frozen=True)
class Status:
    """What a site's process does. life: differs between its processes. doing: in a few words."""

    name: str
    life: str
    doing: str

    def to_bytes(self) -> bytes:
        return tensor_file.pack({"says": "status", **vars(self)}, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Status:
        """Raises UserError if the bytes are none."""
        head, _ = open_message(data, "status", dict.fromkeys(("name", "life", "doing"), is_text))
        return cls(**head)


def failure(data: bytes) -> Failure | None:
    """The failure that a site answered with; None for any other answer, also for bytes that are none."""
    if len(data) > HEAD_BYTES:
        return None
    try:
        head, _ = tensor_file.unpack(data)
    except UserError:
        return None
    if head.keys() != _FAILURE.keys() or not all(check(head[key]) for key, check in _FAILURE.items()):
        return None
    error = "".join(letter if letter.isprintable() else " " for letter in head["error"][:MOST_TEXT])
    return Failure(error, head["whose"], head["again"])


_ANNOUNCED: dict[str, Check] = {
    "run": is_run,
    "site": is_count,
    "sites": is_sites,
    "recipe": is_sections,
    "classes": is_texts,
    "version": is_text,
}
_BROADCAST: dict[str, Check] = dict.fromkeys(("round", "terms", "counted", "start"), lambda value: True)
_JOINED: dict[str, Check] = {
    "name": is_text,
    "samples": is_size,
    "validation": is_count,
    "device": is_text,
    "versions": is_versions,
}
_FAILURE: dict[str, Check] = {
    "error": lambda value: isinstance(value, str),
    "whose": lambda value: value in ("site", "server"),
    "again": is_bool,
}
