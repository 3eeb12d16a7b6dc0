"""Formats settings and names for display."""

from __future__ import annotations

import json
from typing import Any

NO_LICENCE = "# license: to be filled in, after the licences of the base model and of the data"
"""The line of a model card's front matter that stands in place of the licence."""


def setting_text(value: Any) -> str:
    """A setting as a recipe's text. 1.0e-3 and 0.001 give the same text."""
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {setting_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(setting_text, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else printable(str(value))


def printable(text: str) -> str:
    """Replaces every unprintable character by a mark: line ends, control codes and lone surrogates."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


_NAMES = {
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
    "update_cosine": "cosine to the mean update",
    "update_norm": "norm of a client's update",
    "v_spread": "spread of v / mean v",
    "lora_gap": "error of averaging / move",
}


def metric_name(metric: str) -> str:
    """A metric's display name."""
    return _NAMES.get(metric, printable(metric).replace("_", " "))
