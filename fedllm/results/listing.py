"""The runs below a folder, each with its state and its best score: what `fedllm list` shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.results.names import metric_name, printable
from fedllm.results.reader import load_run

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


@dataclass(frozen=True)
class ListedRun:
    """A line of the list.

    folder: as it was found. state: "finished", how many rounds are done, or why the run cannot be read. score: the best
    value of the headline metric, with its name; "" before the first evaluation. changed: seconds since the last round.
    """

    folder: Path
    algorithm: str
    data: str
    seed: int | None
    state: str
    score: str
    changed: float | None

    @property
    def ago(self) -> str:
        """How long ago it changed, in the largest unit that fits; "" if that is not known."""
        if self.changed is None:
            return ""
        unit, size = next((each for each in _UNITS if self.changed >= each[1]), _UNITS[-1])
        return f"{int(self.changed // size)} {unit} ago"


def list_runs(folders: Iterable[str | Path]) -> list[ListedRun]:
    """The runs in these folders and in all folders below them, in the order of their names.

    Raises UserError for a folder that does not exist, and where there is no run at all."""
    named = [Path(folder) for folder in folders]
    for folder in named:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; expected one that holds run folders")
    found = dict.fromkeys(path for folder in named for path in _run_folders(folder))
    if not found:
        raise UserError(
            f"{', '.join(map(str, named))}: no run below it; a run folder has a recipe.yaml, see `fedllm run`"
        )
    return [_listed(path) for path in found]


def _run_folders(folder: Path) -> Iterator[Path]:
    """Run folders have no runs inside, so they are not searched."""
    for path, names, files in os.walk(folder):
        if "recipe.yaml" in files:
            names.clear()
            yield Path(path)
        names.sort()


def _listed(folder: Path) -> ListedRun:
    metrics = folder / "metrics.jsonl"
    changed = max(0.0, time.time() - metrics.stat().st_mtime) if metrics.is_file() else None
    try:
        run = load_run(folder)
    except UserError as error:
        why = printable(str(error)).removeprefix(f"{folder}: ")
        return ListedRun(folder, "", "", None, why, "", changed)
    done, planned = len(run.rounds), run.recipe["federation"]["rounds"]
    state = "finished" if run.finished else f"{done} of {planned} rounds"
    if run.finished and done != planned:
        state = f"finished in round {done}"
    best = run.best_score(run.primary) if run.primary else None
    score = "" if best is None else f"{metric_name(run.primary)} {best:.4f}"
    return ListedRun(folder, run.algorithm, run.task, run.seed, state, score, changed)
