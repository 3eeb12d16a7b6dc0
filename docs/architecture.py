"""The rooms of fedllm, read from the code: their layers, lines and imports, and the picture of docs/architecture.md."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "fedllm"
PAGE = REPOSITORY / "docs" / "architecture.md"
PICTURE = REPOSITORY / "docs" / "images" / "architecture.svg"

Edge = tuple[str, str]
Columns = dict[str, float]
BASE = "common"

# name: its colour on a light and on a dark background
COLOURS = {
    "paper": ("#ffffff", "#16181c"),
    "box": ("#eef3f8", "#242a32"),
    "edge": ("#8fa8bf", "#566575"),
    "ink": ("#1f2a36", "#e6e9ed"),
    "faint": ("#5d6b7a", "#9aa5b1"),
    "arrow": ("#7d94aa", "#71859a"),
    "wrong": ("#d1242f", "#ff6b6b"),
}
WIDTH, HEIGHT = 2.05, 0.62  # of a box
COLUMN, ROW = 2.35, 1.12  # distances between middles of boxes
COLUMNS = tuple(number / 2 for number in range(7))  # where the middle of a box may be
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fedllm", "font.family": "sans-serif", "text.parse_math": False}


@dataclass(frozen=True)
class Rooms:
    """layers: rooms from top to bottom. lines: of code by room. imports: (room, room that it imports)."""

    layers: tuple[tuple[str, ...], ...]
    lines: dict[str, int]
    imports: frozenset[Edge]

    def layer(self, room: str) -> int:
        """The number of the room's layer, from the top."""
        return next(number for number, rooms in enumerate(self.layers) if room in rooms)

    def upward(self) -> set[Edge]:
        """Imports that do not go down, which the contract forbids."""
        return {(a, b) for a, b in self.imports if self.layer(a) >= self.layer(b)}

    def arrows(self) -> set[Edge]:
        """The imports that do not follow from others, and all upward ones. Imports of BASE are left out."""
        down = {(a, b) for a, b in self.imports - self.upward() if b != BASE}
        reach: dict[str, set[str]] = {}
        for room in itertools.chain(*reversed(self.layers)):
            direct = {b for a, b in down if a == room}
            reach[room] = direct.union(*(reach[other] for other in direct))
        implied = {(a, c) for a, c in down for b in reach[a] if c in reach[b]}
        return (down - implied) | self.upward()


def read_rooms() -> Rooms:
    """The rooms as the contract in pyproject.toml orders them and as the code imports them."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    lines: dict[str, int] = {}
    imports = set()
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
        lines[folder.name] = sum(text.count("\n") for text in texts.values())
        for path, text in texts.items():
            imports |= {(folder.name, room) for room in imported_rooms(path, text) if room != folder.name}
    return Rooms(tuple(tuple(re.split(r"\s*\|\s*", line)) for line in layers), lines, frozenset(imports))


def imported_rooms(path: Path, text: str) -> set[str]:
    """The rooms that a file imports anywhere, also inside functions and for type hints."""
    package = ".".join(path.parent.relative_to(REPOSITORY).parts)
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            names += [f"{above}{node.module or ''}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return {one[1] for one in parts if one[0] == "fedllm" and len(one) > 1 and (PACKAGE / one[1]).is_dir()}


def captions() -> dict[str, str]:
    """Room -> its few words, from the table of the page."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))


def places(rooms: Rooms) -> dict[str, tuple[float, float]]:
    """The middle of each room's box. An iterated local search: two layers get random columns, then one layer after the
    other takes its cheapest choice. A result that is not cheaper than the best so far is dropped."""
    random, cost = Random(0), Cost(rooms)
    choices = [list(_choices(layer)) for layer in rooms.layers]
    best: Columns = {room: x for layer in choices for room, x in layer[0].items()}
    for _ in range(150):
        columns = dict(best)
        for layer in random.sample(choices, 2):
            columns |= random.choice(layer)
        for layer in 2 * choices:
            columns = min(({**columns, **choice} for choice in layer), key=cost)
        best = min(best, columns, key=cost)
    return {room: (COLUMN * x, -ROW * rooms.layer(room)) for room, x in best.items()}


def _choices(layer: tuple[str, ...]) -> Iterator[Columns]:
    """Every way to place a layer's rooms without touching boxes."""
    for columns in itertools.permutations(COLUMNS, len(layer)):
        if all(abs(a - b) >= 1 for a, b in itertools.combinations(columns, 2)):
            yield dict(zip(layer, columns, strict=True))


class Cost:
    """How bad columns are. Arrows behind boxes and crossing arrows cost most. Sideways arrows and rooms away from the
    middle cost little."""

    def __init__(self, rooms: Rooms) -> None:
        self._names = [room for layer in rooms.layers for room in layer]
        number = {room: place for place, room in enumerate(self._names)}
        arrows = sorted(rooms.arrows())
        self._from, self._to = (np.array([number[edge[end]] for edge in arrows]) for end in (0, 1))
        layers = np.array([rooms.layer(room) for room in self._names])
        self._top, self._bottom = layers[self._from], layers[self._to]
        self._behind = np.nonzero((self._top[:, None] < layers) & (layers < self._bottom[:, None]))  # (arrow, room)
        arrow, room = self._behind
        height = (self._bottom - self._top)[arrow]
        self._way = [(layers[room] + side - self._top[arrow]) / height for side in (-0.3, 0.3)]
        one, other = np.triu_indices(len(arrows), 1)
        top = np.maximum(self._top[one], self._top[other])
        bottom = np.minimum(self._bottom[one], self._bottom[other])
        meet = top < bottom
        self._pairs = [
            (
                pair[meet],
                [
                    ((end - self._top[pair]) / (self._bottom - self._top)[pair])[meet]
                    for end in (top + 0.2, bottom - 0.2)
                ],
            )
            for pair in (one, other)
        ]

    def __call__(self, columns: Columns) -> float:
        x = np.array([columns[room] for room in self._names])
        start, end = x[self._from], x[self._to]
        arrow, room = self._behind
        ways = [start[arrow] + (end - start)[arrow] * way for way in self._way]
        behind = (np.minimum(*ways) - 0.52 < x[room]) & (x[room] < np.maximum(*ways) + 0.52)
        (a, b), (c, d) = [[start[pair] + (end - start)[pair] * way for way in ways] for pair, ways in self._pairs]
        crossing = (a - c) * (b - d) < 0
        middle = (COLUMNS[0] + COLUMNS[-1]) / 2
        near = 0.3 * np.abs(start - end).sum() + 0.05 * np.square(x - middle).sum()
        return float(6.0 * behind.sum() + 1.0 * crossing.sum() + near)


def draw(rooms: Rooms, dark: bool = False) -> Figure:
    """The picture: a box for each room, layer by layer, and the arrows."""
    colour = {name: pair[dark] for name, pair in COLOURS.items()}
    words, at = captions(), places(rooms)
    starts, ends = ports(rooms, at)
    left, right = (edge([x for x, _ in at.values()]) + way * (WIDTH / 2 + 0.2) for edge, way in ((min, -1), (max, 1)))
    bottom, top = -ROW * (len(rooms.layers) - 1) - HEIGHT / 2 - 0.2, HEIGHT / 2 + 0.2
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(0.98 * (right - left), 0.98 * (top - bottom)), facecolor=colour["paper"])
        axes = figure.add_axes((0, 0, 1, 1))
        for a, b in sorted(rooms.arrows()):
            ink = colour["wrong" if (a, b) in rooms.upward() else "arrow"]
            arrow = FancyArrowPatch(
                (starts[a, b], at[a][1] - HEIGHT / 2), (ends[a, b], at[b][1] + HEIGHT / 2 + 0.02),
                arrowstyle="-|>", mutation_scale=9, linewidth=1.2, color=ink, shrinkA=0, shrinkB=0,
            )  # fmt: skip
            arrow.set_gid(f"arrow-{a}-{b}")
            axes.add_patch(arrow)
        for room, (x, y) in at.items():
            box = FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.09",
                facecolor=colour["box"], edgecolor=colour["edge"], linewidth=1.0, zorder=3,
            )  # fmt: skip
            box.set_gid(f"room-{room}")
            axes.add_patch(box)
            first, last = x - WIDTH / 2 + 0.12, x + WIDTH / 2 - 0.12
            axes.text(first, y + 0.12, room, fontsize=10.5, weight="bold", va="center", color=colour["ink"], zorder=4)
            axes.text(first, y - 0.15, words.get(room, ""), fontsize=8, va="center", color=colour["faint"], zorder=4)
            count = f"{rooms.lines[room]:,} lines"
            axes.text(last, y + 0.12, count, fontsize=8, va="center", ha="right", color=colour["faint"], zorder=4)
        axes.set(xlim=(left, right), ylim=(bottom, top))
        axes.set_axis_off()
    return figure


def ports(rooms: Rooms, at: dict[str, tuple[float, float]]) -> tuple[dict[Edge, float], dict[Edge, float]]:
    """Where each arrow leaves the lower side of a box and meets the upper side of another."""
    found: list[dict[Edge, float]] = []
    for near, far in ((0, 1), (1, 0)):
        side = {}
        for room, (x, _) in at.items():
            arrows = [edge for edge in rooms.arrows() if edge[near] == room]
            arrows.sort(key=lambda edge: ((at[edge[far]][0] - x) / abs(at[edge[far]][1] - at[room][1]), edge))
            for number, edge in enumerate(arrows):
                side[edge] = x + 0.5 * WIDTH * ((number + 0.5) / len(arrows) - 0.5)
        found.append(side)
    return found[0], found[1]


def picture(rooms: Rooms) -> str:
    """The picture as the text of an SVG file that follows the viewer's light or dark mode."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        draw(rooms).savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    names = {light: name for name, (light, _) in COLOURS.items()}
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]}, {found[0]})", text.getvalue())
    modes = ["".join(f"--{name}:{pair[dark]};" for name, pair in COLOURS.items()) for dark in (False, True)]
    style = f"<style>svg{{{modes[0]}}}@media(prefers-color-scheme:dark){{svg{{{modes[1]}}}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\g<1>{style}", svg, count=1)
