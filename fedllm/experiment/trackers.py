"""The numbers of a run's rounds, live, in TensorBoard, and in wandb, trackio and MLflow where they are installed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from fedllm.common.console import warn
from fedllm.common.errors import UserError
from fedllm.common.files import replace_text
from fedllm.common.quiet import quiet

PROJECT = "fedllm"


def require_installed(names: Sequence[str]) -> None:
    """Raises UserError for the first of run.trackers whose package is not there."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"run.trackers: {name} is not installed; pip install {name}, or leave it out of the list")


class Trackers:
    """The trackers of one run that is `done` rounds old. One that fails is left out from there on, with a warning.

    No round is drawn twice when a run resumes, whose rounds repeat bit for bit: TensorBoard drops its later events, and
    for the others folder/trackers.json holds the run's id, MLflow's own id of it, and the last round that each was
    sent.
    """

    def __init__(self, names: Sequence[str], folder: Path, done: int, recipe: dict[str, Any]) -> None:
        self._path = folder / "trackers.json"
        self._known: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "sent": {}}
        with contextlib.suppress(OSError, ValueError):
            self._known |= json.loads(self._path.read_text(encoding="utf-8"))
        self._open: dict[str, GeneralTracker] = {}
        for name in dict.fromkeys(names):
            with self._survived(name):
                tracker = (
                    _mlflow(folder, self._known)
                    if name == "mlflow"
                    else _tracker(name, folder, done, self._known["id"])
                )
                tracker.start()
                if name == "mlflow":
                    self._begin_mlflow(tracker, recipe)
                elif name != "tensorboard":
                    tracker.store_init_configuration(recipe)
                self._open[name] = tracker

    def write(self, line: dict[str, Any]) -> None:
        """Sends every number of a line of metrics.jsonl. One inside per_client has the names of its keys in its own."""
        round = line["round"]
        inside = dict(_flat("per_client", line.get("per_client", {})))
        numbers = {
            name: value for name, value in (line | inside).items() if isinstance(value, int | float) and name != "round"
        }
        for name, tracker in list(self._open.items()):
            with self._survived(name):
                if name != "tensorboard" and not self._is_new(name, round):
                    continue
                tracker.log(numbers, step=round)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for name, tracker in list(self._open.items()):
            with self._survived(name):
                tracker.finish()

    def _begin_mlflow(self, tracker: GeneralTracker, recipe: dict[str, Any]) -> None:
        """Notes MLflow's id of a new run, and sends it the recipe: MLflow refuses parameters that change later."""
        if "mlflow" not in self._known:
            self._known["mlflow"] = tracker.tracker.info.run_id
            self._write()
            tracker.store_init_configuration(dict(_flat("", recipe, ".")))

    def _write(self) -> None:
        replace_text(self._path, json.dumps(self._known) + "\n")

    def _is_new(self, name: str, round: int) -> bool:
        """Whether a tracker was not sent this round before; notes that it is now."""
        if round <= self._known["sent"].get(name, 0):
            return False
        self._known["sent"][name] = round
        self._write()
        return True

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """Catches every error of a tracker, so that the run continues."""
        try:
            with quiet(), contextlib.redirect_stdout(io.StringIO()):
                yield
        except Exception as error:
            self._open.pop(name, None)
            warn(f"run.trackers: {name} failed and is left out from here on: {type(error).__name__}: {error}")


def _flat(name: str, values: Mapping[str, Any], between: str = "/") -> Iterator[tuple[str, Any]]:
    """The innermost values, each under the names that lead to it."""
    for key, value in values.items():
        path = f"{name}{between}{key}" if name else key
        if isinstance(value, Mapping):
            yield from _flat(path, value, between)
        else:
            yield path, value


def _mlflow(folder: Path, known: Mapping[str, Any]) -> GeneralTracker:
    """MLflow's tracker. Where it writes is MLflow's own rule: MLFLOW_TRACKING_URI, or its store in this directory."""
    name = f"{folder.resolve().name}-{known['id']}"
    return MLflowTracker(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), run_id=known.get("mlflow"), run_name=name)


def _tracker(name: str, folder: Path, done: int, id: str) -> GeneralTracker:
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", str(folder), purge_step=done + 1 if done else None)
    title = f"{folder.resolve().name}-{id}"
    if name == "trackio":
        return TrackioTracker(PROJECT, name=title, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    # Without its usual settings wandb would ask for an account at the terminal, and wait.
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),
        name=title,
        id=id,
        resume="allow" if mode == "online" else None,
        mode=mode,
        dir=str(folder),
        settings={"silent": True, "console": "off"},
    )
