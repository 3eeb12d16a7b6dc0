"""The Hessian study: trains the models, computes their Hessians, writes figures and numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedllm.algorithms.base import Algorithm
from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.common.files import replace_text
from fedllm.studies.character_models import MODELS
from fedllm.studies.hessian import CLIENTS, Map, Structure, Study, load_streams, study

_CAPTION = (
    "Share of the Hessian's squared norm inside our blocks (its ratio to the share inside random blocks of the same "
    "sizes). ! marks where ours hold no more than random ones."
)
_MAGNITUDES = "Mean |entry| of each Hessian."


def run(
    kinds: Sequence[str], data: str, alg: Algorithm, *, rounds: int, seed: int, out: Path, progress: ProgressCallback
) -> list[Study]:
    """Studies each kind of model, and writes `hessian.json` and `hessian_<model>.png` and `.svg` into `out`."""
    from fedllm.reporting.style import save
    from fedllm.studies.hessian_figures import draw

    if rounds < 1:
        raise UserError(f"--rounds: found {rounds}, expected 1 or more")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, expected a folder")
    streams = load_streams(data)
    studies = [study(kind, streams, alg, rounds=rounds, seed=seed, progress=progress) for kind in kinds]
    out.mkdir(parents=True, exist_ok=True)
    for found in studies:
        figure = draw(found)
        for suffix in ("png", "svg"):
            save(figure, out / f"hessian_{found.model}.{suffix}")
    settings = {"data": data, "rounds": rounds, "seed": seed, "algorithm": type(alg).__name__, "lr": alg.lr}
    replace_text(out / "hessian.json", json.dumps(settings | _record(studies), indent=2) + "\n")
    return studies


def _record(studies: Sequence[Study]) -> dict[str, object]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fedllm": version("fedllm"),
    }
    models = {
        found.model: {
            "loss": found.loss,
            "maps": [
                {"role": m.role, "parameter": m.parameter, "round": m.round, "coordinates": len(m.owner)}
                | {"blocks": m.blocks, **asdict(m.structure), "ratio": m.structure.ratio, **asdict(m.magnitude)}
                for m in found.maps
            ],
        }
        for found in studies
    }
    return {"clients": asdict(CLIENTS), "versions": versions, "models": models}


def table(found: Study) -> Table:
    """The terminal table, one row per weight: its blocks, and inside (ratio) after each checkpoint."""
    rows = [
        (f"{maps[0].blocks} in {len(maps[0].owner):,}", *(_share(m.structure) for m in maps)) for maps in _rows(found)
    ]
    return _table(found, f"{found.model} under {found.algorithm}", _CAPTION, ("blocks",), rows)


def magnitudes(found: Study) -> Table:
    """The terminal table of magnitudes, one row per weight: the mean |entry| of its Hessian after each checkpoint."""
    rows = [tuple(f"{m.magnitude.mean_entry:.1e}" for m in maps) for maps in _rows(found)]
    return _table(found, f"{found.model}: magnitudes", _MAGNITUDES, (), rows)


def _rows(found: Study) -> list[list[Map]]:
    """The maps of each weight, one per checkpoint."""
    return [[m for m in found.maps if m.role == role] for role in MODELS[found.model].weights]


def _table(found: Study, title: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(title=title, box=SIMPLE_HEAD, show_edge=False, caption=caption)
    for heading in ("weight", *headings, *(f"round {t}" for t in found.rounds)):
        shown.add_column(heading, justify="left" if heading == "weight" else "right", no_wrap=True)
    for role, cells in zip(MODELS[found.model].weights, rows, strict=True):
        shown.add_row(role, *cells)
    return shown


def _share(found: Structure) -> str:
    return f"{found.inside:.2f} ({found.ratio:.1f}{_verdict(found)})"


def _verdict(found: Structure) -> str:
    return "" if found.ratio > 1 else "!"
