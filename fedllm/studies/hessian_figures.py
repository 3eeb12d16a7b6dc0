"""Heat maps of Hessians in the order of their blocks."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fedllm.studies.character_models import MODELS
from fedllm.studies.hessian import Map, Study

_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "text.color": "#333333",
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#BBBBBB",
}
_PIXELS = 128  # largest side of a map
_SCALE = LogNorm(1e-3, 1, clip=True)
_COLOURS = mpl.colormaps["magma_r"].resampled(24)  # few colours make a small file


def draw(study: Study) -> Figure:
    """Draws the maps: one row per round, one column per weight.

    A pixel is the mean |H| over the entries that it covers. Each map has its own colour scale: three decades, up to the
    map's 99.5th percentile.
    """
    roles = list(MODELS[study.model].weights)
    rows, columns = len(study.rounds), len(roles)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(1.3 * columns + 1.1, 1.58 * rows + 0.75), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        for m in study.maps:
            axes = panels[study.rounds.index(m.round), roles.index(m.role)]
            _draw_map(axes, m)
            if m.round == study.rounds[0]:
                axes.set_title(f"{m.role}\n{m.blocks} blocks", fontsize=8.5, pad=5)
            if m.role == roles[0]:
                axes.set_ylabel(f"round {m.round}\nloss {study.loss[m.round]:.2f}")
        bar = figure.colorbar(ScalarMappable(_SCALE, _COLOURS), ax=panels, shrink=0.6, aspect=26, pad=0.01, format="%g")
        bar.set_label("|H| / its 99.5th percentile", fontsize=8)
        bar.ax.tick_params(which="both", length=0, labelsize=7.5)
        figure.supxlabel(
            "share of the Hessian inside the blocks / inside\nrandom blocks of the same sizes = their ratio",
            fontsize=8, color="#707070",
        )  # fmt: skip
    return figure


def _draw_map(axes: Axes, m: Map) -> None:
    pixels = _shrink(m.H.abs())
    top = float(np.quantile(pixels, 0.995)) or 1.0
    axes.imshow(pixels / top, norm=_SCALE, cmap=_COLOURS, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    s = m.structure
    axes.set_xlabel(f"{s.inside:.2f} / {s.random:.2f} = {s.ratio:.1f}", fontsize=7.5)


def _shrink(H: Tensor) -> np.ndarray:
    """Shrinks [n, n] to at most _PIXELS per side; each pixel is the mean of a square of entries."""
    side = -(-len(H) // _PIXELS)
    pooled: np.ndarray = avg_pool2d(H[None], side, ceil_mode=True, count_include_pad=False)[0].numpy()
    return pooled
