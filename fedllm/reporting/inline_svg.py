"""Puts figures into an HTML page, in the colours of its light and its dark style."""

from __future__ import annotations

import re

from fedllm.reporting.style import COLOURS, FAINT, GRID, INK, PAPER

# Each colour of a figure is a variable of the page: its name, its value on light and on dark paper.
_DARK = ("#4FA8E0", "#F2803A", "#2FC79B", "#E59CC6", "#F0B429", "#8CCBF2", "#E8EAED")
VARIABLES = {
    "paper": (PAPER, "#16181C"),
    "ink": (INK, "#E2E4E8"),
    "faint": (FAINT, "#9AA0A8"),
    "grid": (GRID, "#2C3036"),
    **{f"line{i}": pair for i, pair in enumerate(zip(COLOURS, _DARK, strict=True))},
}
_NAMES = {light.lower(): name for name, (light, _) in VARIABLES.items()}


def inline_svg(text: str, name: str, title: str) -> str:
    """A figure's SVG file (style.svg) as an element whose ids start with `name`, so that a page may hold several.

    title: plain text without markup, for readers who cannot see the figure.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'style="[^"]*"', lambda style: re.sub(r"#[0-9a-f]{6}\b", _variable, style[0]), text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _variable(colour: re.Match[str]) -> str:
    name = _NAMES.get(colour[0])
    return f"var(--{name})" if name else colour[0]
