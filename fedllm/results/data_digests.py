"""Digests of the data that a run was made with. They tell data sets apart whose files have the same name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from fedllm.results.format import compared, settings_key
from fedllm.results.run_record import RunRecord

_SPLITS = ("training", "validation")


def read_digests(folder: Path, partition: dict[str, Any] | None) -> dict[str, str]:
    """The digests in partition.json, given as `partition`. Older runs have them in their checkpoints alone.

    {} where neither has them.
    """
    told = chain([(partition or {}).get("data")], map(_checkpoint_digests, _manifests(folder)))
    return next(({split: found[split] for split in _SPLITS} for found in told if _complete(found)), {})


def _manifests(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*/manifest.json"), reverse=True)


def _checkpoint_digests(manifest: Path) -> Any:
    """The digests in a checkpoint's manifest; None if it is damaged, which concerns only a run that goes on."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return json.loads(manifest.read_text(encoding="utf-8"))["facts"]["data"]
    return None


def _complete(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in _SPLITS)


def with_digests(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs; one without digests gets those of the runs with the same data settings, if these agree."""
    known: dict[str, list[dict[str, str]]] = {}
    for run in runs:
        found = known.setdefault(data_settings(run), [])
        if run.data and run.data not in found:
            found.append(run.data)
    return [
        replace(run, data=found[0]) if not run.data and len(found := known[data_settings(run)]) == 1 else run
        for run in runs
    ]


def data_settings(run: RunRecord, *others: str) -> str:
    """A text that is equal for runs with equal settings of the data, but for data.max_length and the keys `others`. A
    setting that is null equals one that an older recipe did not have."""
    settings = {key: value for (section, key), value in compared(run.recipe).items() if section == "data"}
    ignored = ("max_length", *others)
    given = {key: value for key, value in settings.items() if key not in ignored and value is not None}
    return settings_key({("data", key): value for key, value in given.items()})
