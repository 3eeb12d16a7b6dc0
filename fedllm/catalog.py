"""The algorithms as their classes describe themselves: `fedllm algorithms [NAME]` and docs/algorithms.md.

python -m fedllm.catalog > docs/algorithms.md
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedllm.algorithms import Algorithm, algorithm_class, algorithm_names
from fedllm.algorithms.base import Vectors
from fedllm.costs import Traffic
from fedllm.settings import describe as describe_type


@dataclass(frozen=True)
class Scale:
    """The sizes that turn vectors into bytes: d, B, S and T."""

    dim: int
    num_blocks: int
    sampled: int
    tracked: int


@dataclass(frozen=True)
class HyperParameter:
    """One setting: its key in a recipe, the paper's symbol, what it takes, its default and its meaning."""

    key: str
    symbol: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Footprint:
    """What an algorithm, as set, keeps and sends beside x itself; down and up count x and d too."""

    server: Vectors
    client: Vectors
    down: Vectors
    up: Vectors
    tracked_up: Vectors

    @classmethod
    def of(cls, alg: Algorithm) -> Footprint:
        return cls(
            server=dict(alg.server_vectors()),
            client=dict(alg.client_vectors()),
            down={"x": "d", **alg.downloads()},
            up=dict(alg.uploads()),
            tracked_up=dict(alg.tracked_uploads()),
        )

    def up_text(self) -> str:
        """What a sampled client sends on average, for example "d + T/S d"."""
        if not self.tracked_up:
            return _amount(self.up)
        share = _amount(self.tracked_up)
        return f"{_amount(self.up)} + T/S {f'({share})' if '+' in share else share}"

    def traffic(self, scale: Scale) -> Traffic:
        """One round in numbers and bytes."""

        def values(vectors: Vectors) -> int:
            return sum(scale.dim if of == "d" else scale.num_blocks for of in vectors.values())

        return Traffic(values(self.down), values(self.up), values(self.tracked_up), scale.sampled, scale.tracked)


@dataclass(frozen=True)
class Entry:
    """One algorithm. footprint: by default. variants: settings under which it keeps or sends something else."""

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
        own=tuple(_hyper_parameters(cls, own=True)),
        footprint=footprint,
        variants={setting: other for setting, other in others.items() if other != footprint},
    )


def _alternatives(cls: type[Algorithm]) -> Iterator[tuple[str, Algorithm]]:
    """The algorithm with one of its choices made differently, for each such choice."""
    hints, default = get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        choices = (False, True) if hints[field.name] is bool else get_args(hints[field.name])
        if hints[field.name] is bool or get_origin(hints[field.name]) is Literal:
            for choice in choices:
                if choice != getattr(default, field.name):
                    key = field.metadata.get("key") or field.name
                    yield f"{key}: {_plain(choice)}", cls(**{field.name: choice})


def _hyper_parameters(cls: type[Algorithm], own: bool) -> Iterator[HyperParameter]:
    """The settings that `cls` adds or redefines (own), or those it has from every algorithm."""
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
    """A value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _amount(vectors: Vectors) -> str:
    """For example "2 d + B"."""
    counts = Counter(vectors.values())
    return " + ".join(of if counts[of] == 1 else f"{counts[of]} {of}" for of in ("d", "B") if counts[of]) or "0"


def _named(vectors: Vectors) -> str:
    """For example "y, vbar (B)": numbers per block are marked."""
    return ", ".join(name if of == "d" else f"{name} (B)" for name, of in vectors.items()) or "-"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# For the terminal.


def table(scale: Scale | None = None) -> Table:
    """All algorithms; with `scale` also the bytes of a round, all clients together."""
    columns = ["name", "aliases", "client keeps", "server keeps", "down", "up"]
    made = Table(*columns, *(["bytes down", "bytes up"] if scale else []), box=box.SIMPLE_HEAD, caption=_caption(scale))
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    for each in map(entry, algorithm_names()):
        cells = [each.name, "\n".join(each.aliases) or "-", *_traffic_cells(each.footprint)]
        if scale:
            sent = each.footprint.traffic(scale)
            cells += [_bytes(sent.bytes_down), _bytes(sent.bytes_up)]
        made.add_row(*map(Text, cells))
    return made


def _caption(scale: Scale | None) -> str:
    sizes = f" d = {scale.dim:,}, B = {scale.num_blocks:,}, S = {scale.sampled}, T = {scale.tracked}." if scale else ""
    return f"d, B: one number a coordinate, a block. By default settings; fedllm algorithms NAME tells all.{sizes}"


def _traffic_cells(footprint: Footprint) -> list[str]:
    return [_named(footprint.client), _named(footprint.server), _amount(footprint.down), footprint.up_text()]


def describe(name: str, scale: Scale | None = None) -> RenderableType:
    """One algorithm: equations, notes, settings, what it keeps and sends. Raises UserError for an unknown name."""
    each = entry(name)
    parts: list[RenderableType] = [Text(each.summary, style="bold")]
    if each.paper:
        parts.append(Text(each.paper, style="italic"))
    if each.aliases:
        parts.append(Text(f"also called {', '.join(each.aliases)}"))
    parts.append(Padding(Text(each.equations), (1, 4)))
    if each.notes:
        parts.append(Padding(Text(_flowing(each.notes)), (0, 0, 1, 0)))
    cls = algorithm_class(name)
    settings = Table("key", "symbol", "default", "meaning", title="Settings", box=box.SIMPLE_HEAD)
    for setting in (*each.own, *_hyper_parameters(cls, own=False)):
        settings.add_row(*map(Text, (setting.key, setting.symbol, setting.default, _meaning(setting))))
    traffic = Table("", "client keeps", "server keeps", "down", "up", title="Kept and sent", box=box.SIMPLE_HEAD)
    for label, footprint in {"default": each.footprint, **each.variants}.items():
        traffic.add_row(*map(Text, (label, *_traffic_cells(footprint))))
    parts += [settings, traffic]
    if each.derivable:
        parts.append(Text(_traffic_note(each)))
    if scale:
        sent = each.footprint.traffic(scale)
        parts.append(Text(f"a round sends {_bytes(sent.bytes_down)} down and {_bytes(sent.bytes_up)} up, all clients"))
    return Group(*parts)


def _flowing(text: str) -> str:
    """Paragraphs without the line breaks of a docstring."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _meaning(setting: HyperParameter) -> str:
    return f"{setting.meaning} ({setting.type})"


def _traffic_note(each: Entry) -> str:
    return f"A client that saw the last x can work out {', '.join(each.derivable)} from the new one: d less down."


# For docs/algorithms.md.

_INTRO = """\
<!-- Generated from fedllm/algorithms: change the classes, then run `python -m fedllm.catalog > docs/algorithms.md`. -->

# Algorithms

Use one by its name or an alias, in a recipe (`algorithm: {name: fadamgc, lr: 1.0e-4}`) or in Python
(`load_algorithm("fadamgc", lr=1e-4)`); for your own, see [your_own_algorithm.md](your_own_algorithm.md).

## Notation

N clients, S of them sampled in a round, T of those tracked (`federation.tracked_per_round`, by default S), K local
steps k = 1..K, rounds t = 0, 1, ... x is the global model, all trainable parameters as one vector of d numbers; x_i is
client i's copy and d_i = x_i - x after its steps; D is the mean of d_i over the sampled clients. g is the stochastic
gradient at x_i, eta the local rate of the step, eta_g the server's, lambda the weight decay, (b1, b2) `betas`.
Products, squares, roots and maxima are elementwise, and 0/0 is a step of 0. `K eta` is the sum of the rates really
used, so the formulas stay exact under every schedule; in a server formula it is the mean of the clients' sums.
*choice* marks where a paper is silent or contradicts itself.
"""

_TRAFFIC = """\
d and (B) stand for a vector with one number a coordinate, and one a block (see `blocks`). down is what each of the S
sampled clients receives, x included; up is what it sends, d_i included, T/S being the share of those that are tracked.
What only the server needs never leaves it. GC counts the tracked vector for the T clients in both directions, 2 + 2 T/S
model-sized vectors; we count it down to all S, who need it to correct their gradients. Where a client that saw the last
x can work out a vector from the new one, the section of the algorithm says so, and down is one d less for it.
"""


def markdown() -> str:
    """The text of docs/algorithms.md."""
    entries = [entry(name) for name in algorithm_names()]
    rows = [[f"[{e.name}](#{e.name})", ", ".join(e.aliases) or "-", *_traffic_cells(e.footprint)] for e in entries]
    overview = _markdown_table(["name", "aliases", "client keeps", "server keeps", "down", "up"], rows)
    common = _settings_table(_hyper_parameters(algorithm_class("fedavg"), own=False))
    sections = [
        _INTRO,
        "## What is kept and what is sent\n",
        overview,
        _TRAFFIC,
        "## Settings of every algorithm\n",
        common,
        *map(_section, entries),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _section(each: Entry) -> str:
    lines = [f"## {each.name}\n", f"{each.summary}\n", f"Source: {each.paper}.\n"]
    if each.aliases:
        lines.append(f"Aliases: {', '.join(f'`{alias}`' for alias in each.aliases)}.\n")
    lines.append(f"```text\n{each.equations}\n```\n")
    if each.notes:
        lines.append(f"{each.notes}\n")
    if each.own:
        lines.append(_settings_table(iter(each.own)))
    labelled = {"default": each.footprint, **{f"`{setting}`": other for setting, other in each.variants.items()}}
    rows = [[label, *_traffic_cells(footprint)] for label, footprint in labelled.items()]
    lines.append(_markdown_table(["", "client keeps", "server keeps", "down", "up"], rows))
    if each.derivable:
        lines.append(f"{_traffic_note(each)}\n")
    return "\n".join(lines)


def _settings_table(settings: Iterator[HyperParameter]) -> str:
    rows = [[f"`{s.key}`", s.symbol or "-", s.default, _meaning(s)] for s in settings]
    return _markdown_table(["key", "symbol", "default", "meaning"], rows)


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
