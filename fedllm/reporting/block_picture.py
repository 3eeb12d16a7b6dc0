"""The figure of a model's block partition: one weight of each kind, with its blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Size, nn

from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import Run, Tile
from fedllm.blocks.wrappers import readable
from fedllm.reporting.style import require_drawable, save

_STYLE: dict[Any, Any] = {"font.size": 9.0, "text.color": "#333333"}
_HEADS, _ONES, _WHOLE = ("#0072B2", "#8FC1E3"), ("#C65300", "#F2B98A"), ("#009E73", "#7FCDB5")
_STRIPES = 32  # the most blocks drawn one by one; with more, the first half of them, and the rest as a faded area
_COLUMNS = 4


@dataclass(frozen=True)
class Card:
    """A kind of weight, `count` times in the model with the same blocks. shape: of one; () for all vectors together."""

    title: str
    shape: tuple[int, ...]
    tile: Tile
    count: int


def write_blocks(model: nn.Module, blocks: BlockPartition, name: str, path: Path) -> Path:
    """Draws a model's partition into a .png, .svg or .pdf file. Raises UserError for another suffix or no folder."""
    require_drawable(path)
    return save(draw_blocks(cards(model, blocks), name, blocks), path)


def cards(model: nn.Module, blocks: BlockPartition) -> list[Card]:
    """The kinds of weights in the order of the model. Layers with the same blocks are one kind, all vectors another."""
    shapes = {readable(name): value.shape for name, value in model.named_parameters()}
    groups: dict[tuple[str, Size, tuple[Run, ...]], list[Tile]] = {}
    for tile in blocks.tiles:
        vector = tile.role == "vector"
        shape = Size() if vector else shapes.get(tile.name, Size([tile.dim]))
        title = "vectors (biases, norms)" if vector else re.sub(r"\.\d+\.", ".*.", tile.name)
        groups.setdefault((title, shape, () if vector else tile.runs), []).append(tile)
    return [Card(title, tuple(shape), tiles[0], len(tiles)) for (title, shape, _), tiles in groups.items()]


def draw_blocks(shown: Sequence[Card], name: str, blocks: BlockPartition) -> Figure:
    """The cards on a grid: each weight as a matrix in its stored shape, neighbouring blocks in two tones."""
    rows = -(-len(shown) // _COLUMNS)
    columns = min(_COLUMNS, len(shown))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(2.6 * columns + 0.2, 2.2 * rows + 0.7), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in panels:
            axes.set_axis_off()
        for axes, card in zip(panels, shown, strict=False):
            _draw_card(axes, card)
        figure.suptitle(f"{name}: {blocks.num_blocks:,} numbers replace {blocks.dim:,}", weight="bold", fontsize=11)
        figure.supxlabel(
            "blue: one block per head; orange: one per row, column or filter (output neuron, token, class, LoRA "
            "direction); green: one block\nwith more than 32 blocks the first are drawn and the rest are faded",
            fontsize=8, color="#707070",
        )  # fmt: skip
    return figure


def _draw_card(axes: Axes, card: Card) -> None:
    """Draws one weight with height 1, and under it how many numbers its blocks replace."""
    tile = card.tile
    transposed = tile.repeats > 1
    width = min(max(card.shape[1] / card.shape[0], 0.6), 1.8) if len(card.shape) == 2 else 1.8
    axes.set_xlim(-0.05, 1.95)
    axes.set_ylim(1.38, -0.36)
    axes.set_aspect("equal")
    axes.text(0, -0.12, _fold(card), va="bottom", weight="bold", fontsize=7.5, linespacing=1.25)
    for start, length, colour, alpha in _stripes(tile):
        corner, size = ((start * width, 0), (length * width, 1)) if transposed else ((0, start), (width, length))
        axes.add_patch(Rectangle(corner, *size, facecolor=colour, alpha=alpha, linewidth=0))
    axes.add_patch(Rectangle((0, 0), width, 1, fill=False, edgecolor="#555555", linewidth=0.8))
    axes.text(0, 1.06, _caption(card), va="top", fontsize=7.5, linespacing=1.35)


def _stripes(tile: Tile) -> Iterator[tuple[float, float, str, float]]:
    """(start, length, colour, alpha) of each stripe across a weight of length 1."""
    left, block = 0.0, 0
    for run in tile.runs:
        share = run.count * run.width / tile.span
        tones = _HEADS if "head" in run.label else _ONES if run.label else _WHOLE
        drawn = run.count if run.count <= _STRIPES else _STRIPES // 2
        part = share if run.count <= _STRIPES else share / 2
        for index in range(drawn):
            yield left + index * part / drawn, part / drawn, tones[(block + index) % 2], 1.0
        if part < share:
            yield left + part, share - part, tones[1], 0.45
        left, block = left + share, block + run.count


def _fold(card: Card) -> str:
    """The weight's name on two lines, and how many there are in the model."""
    name = card.title.removesuffix(".weight")
    words = name.split(".")
    times = f"  ({card.count} of them)" if card.count > 1 else ""
    return (".".join(words[:-2]) + "\n" + ".".join(words[-2:]) if len(words) > 2 else name) + times


def _caption(card: Card) -> str:
    if not card.shape:
        return "one number each"
    tile = card.tile
    counts = Counter[str]()
    for run in tile.runs:
        counts[run.label] += run.count
    kinds = [f"{count:,} {label}{'s' if count > 1 else ''}" for label, count in counts.items() if label]
    shape = " x ".join(f"{size:,}" for size in card.shape)
    between = ", " if len(kinds) < 3 else "\n"
    return f"{shape}: {between.join(kinds) or 'whole'}\n{tile.dim:,} → {tile.num_blocks:,} numbers"
