"""The algorithms as data, read from their classes: equations, settings, and what they store and send."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from fedllm.algorithms import Algorithm, algorithm_class
from fedllm.algorithms.base import Length, Vectors, values
from fedllm.common.errors import UserError
from fedllm.common.schema import describe as describe_type

if TYPE_CHECKING:
    from fedllm.federation.costs import Traffic


COLUMNS = ("client keeps", "server keeps", "down", "up", "client holds")  # of Footprint.cells


@dataclass(frozen=True)
class Scale:
    """The sizes from which bytes are counted: d, B, S and T."""

    dim: int
    num_blocks: int
    sampled: int
    tracked: int


@dataclass(frozen=True)
class HyperParameter:
    """One setting: its key in a recipe, the paper's symbol, its type, default and meaning."""

    key: str
    symbol: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Footprint:
    """The vectors that an algorithm stores and sends with given settings. server, client: without x. down, up: with x
    and d. held: the number of vectors that a client holds while it trains, see Algorithm.held_vectors."""

    server: Vectors
    client: Vectors
    down: Vectors
    up: Vectors
    tracked_up: Vectors
    held: int

    @classmethod
    def of(cls, alg: Algorithm) -> Footprint:
        return cls(
            server=dict(alg.server_vectors()),
            client=dict(alg.client_vectors()),
            down={"x": "d", **alg.downloads()},
            up=dict(alg.uploads()),
            tracked_up=dict(alg.tracked_uploads()),
            held=alg.held_vectors(),
        )

    def up_text(self) -> str:
        """The size of a sampled client's mean upload, for example "d + T/S d"."""
        if not self.tracked_up:
            return _amount(self.up)
        share = _amount(self.tracked_up)
        return f"{_amount(self.up)} + T/S {f'({share})' if '+' in share else share}"

    def cells(self) -> list[str]:
        """The cells of a table under COLUMNS."""
        return [_named(self.client), _named(self.server), _amount(self.down), self.up_text(), str(self.held)]

    def traffic(self, scale: Scale) -> Traffic:
        """The numbers and bytes of one round."""
        from fedllm.federation.costs import Traffic  # here: it brings torch

        def sent(vectors: Vectors) -> int:
            return sum(values(of, scale.dim, scale.num_blocks) for of in vectors.values())

        return Traffic(sent(self.down), sent(self.up), sent(self.tracked_up), scale.sampled, scale.tracked)


@dataclass(frozen=True)
class Entry:
    """One algorithm. footprint: with default settings. variants: the settings that change it."""

    name: str
    summary: str
    equations: str
    notes: str
    paper: str
    aliases: tuple[str, ...]
    derivable: tuple[str, ...]
    own: tuple[HyperParameter, ...]
    footprint: Footprint
    variants: Mapping[str, Footprint]


def entry(name: str) -> Entry:
    """The description of a name, an alias or "package.module:Class". Raises UserError for an unknown one."""
    cls = algorithm_class(name)
    equations, _, notes = (inspect.getdoc(cls) or "").partition("\n\n")
    footprint = Footprint.of(cls())
    others = {setting: Footprint.of(alg) for setting, alg in _alternatives(cls)}
    return Entry(
        name=name if ":" in name else cls.__module__.rpartition(".")[2],
        summary=(sys.modules[cls.__module__].__doc__ or cls.__name__).partition("\n")[0],
        equations=equations,
        notes=notes,
        paper=cls.paper,
        aliases=cls.aliases,
        derivable=cls.derivable,
        own=tuple(hyper_parameters(cls, own=True)),
        footprint=footprint,
        variants={setting: other for setting, other in others.items() if other != footprint},
    )


def _alternatives(cls: type[Algorithm]) -> Iterator[tuple[str, Algorithm]]:
    """The algorithm with one setting at another of its choices, for every setting with choices; without choices that
    need another setting to change with them."""
    hints, default = get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        choices = (False, True) if hints[field.name] is bool else get_args(hints[field.name])
        if hints[field.name] is bool or get_origin(hints[field.name]) is Literal:
            for choice in choices:
                if choice != getattr(default, field.name):
                    key = field.metadata.get("key") or field.name
                    with contextlib.suppress(UserError):
                        yield f"{key}: {_plain(choice)}", cls(**{field.name: choice})


def hyper_parameters(cls: type[Algorithm], own: bool) -> Iterator[HyperParameter]:
    """The settings that `cls` adds or redefines (own), or else those of every algorithm."""
    hints, default = get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        if (field.name in inspect.get_annotations(cls)) == own:
            yield HyperParameter(
                key=field.metadata.get("key") or field.name,
                symbol=field.metadata.get("symbol", ""),
                type=describe_type(hints[field.name]),
                default=_plain(getattr(default, field.name)),
                meaning=field.metadata.get("help", ""),
            )


def _plain(value: Any) -> str:
    """A value as it is written in a recipe."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _amount(vectors: Vectors) -> str:
    """For example "2 d + B"."""
    counts = Counter(vectors.values())
    return " + ".join(of if counts[of] == 1 else f"{counts[of]} {of}" for of in get_args(Length) if counts[of]) or "0"


def _named(vectors: Vectors) -> str:
    """For example "y, vbar (B)": (B) marks vectors with one number per block."""
    return ", ".join(name if of == "d" else f"{name} ({of})" for name, of in vectors.items()) or "-"
