"""A run under way: how it begins, and how it goes on from a checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedllm.common.console import say, say_all, stage, warn
from fedllm.common.errors import UserError
from fedllm.common.files import replace_text, sync
from fedllm.config.recipe import CHOSEN_KEYS, Recipe
from fedllm.experiment.build import ReadCache
from fedllm.experiment.checkpoints import Checkpoints, Snapshot
from fedllm.experiment.job import Job
from fedllm.experiment.privacy import decided_privacy
from fedllm.experiment.records import partition_summary, start_costs
from fedllm.experiment.resume import as_before, check_data
from fedllm.experiment.round_source import RoundSource
from fedllm.experiment.run_facts import RunFacts
from fedllm.experiment.trackers import require_installed
from fedllm.federation.executor import Executor, describe
from fedllm.federation.rounds import start
from fedllm.federation.setup import BUFFERS
from fedllm.federation.state import FederationState, blank
from fedllm.results.format import best_line, out_of_patience, rounds_to

CLIENTS = "clients"  # subfolder of the run folder, removed when the run ends; checkpoints link its files


@dataclass
class Session:
    """A run under way, in one of its processes. metrics: the lines of metrics.jsonl."""

    job: Job
    folder: Path
    executor: Executor
    state: FederationState
    facts: RunFacts
    metrics: list[dict[str, Any]]

    @property
    def complete(self) -> bool:
        """Whether the run has ended, see `ended_by`, or the next round would exceed privacy.epsilon."""
        over = len(self.metrics) >= self.job.last_round
        return over or ended_by(self.job.recipe, self.best_by, self.metrics) is not None

    @property
    def best_by(self) -> str:
        """The score by which a round is the best."""
        return self.job.recipe.eval.metric or self.job.task.primary

    @property
    def best_round(self) -> int | None:
        """The best evaluated round so far; None before the first."""
        best = best_line(self.best_by, self.metrics)
        return None if best is None else int(best["round"])


def ended_by(recipe: Recipe, best_by: str, metrics: Sequence[dict[str, Any]]) -> str | None:
    """What ended a run after these rounds: "rounds", "target" or "patience"; None where it goes on.

    best_by: the score by which a round is the best. metrics: the lines of metrics.jsonl.
    """
    if recipe.eval.stop_at_target and rounds_to(recipe.eval.target, metrics) is not None:
        return "target"
    if len(metrics) >= recipe.federation.rounds:
        return "rounds"
    return "patience" if out_of_patience(best_by, recipe.eval.patience, metrics) else None


def open_session(
    recipe: Recipe,
    folder: Path,
    executor: Executor,
    checkpoints: Checkpoints,
    source: RoundSource,
    moved: Sequence[str] = (),
    cache: ReadCache | None = None,
) -> Session:
    """Builds the run of a recipe: a new one, or one that goes on after its newest checkpoint.

    source: what computes its rounds. moved: see check_folder. cache: see run.
    """
    require_installed(recipe.run.trackers)
    snapshot = checkpoints.latest() if executor.rank == 0 else None
    before: Any = executor.on_first(lambda: _known(snapshot, checkpoints, folder))
    facts = None if before is None else RunFacts.from_json(before[0])
    job = source.build(as_before(recipe, facts), cache, executor)
    if facts is not None:
        check_data(job, facts, folder, moved)
    say_all(job.notes, job.warnings)
    executor.on_first(lambda: _describe(job, recipe, folder))
    files = executor.share_folder(_empty_folder(folder / CLIENTS, executor))
    if facts is None:
        session = _begin(job, folder, executor, files)
    else:
        session = _resume(job, folder, executor, files, facts, snapshot)
        session.metrics = before[1]
    executor.on_first(lambda: replace_text(folder / "start.json", json.dumps(session.facts.start) + "\n"))
    source.begin(session)
    return session


def _known(snapshot: Snapshot | None, checkpoints: Checkpoints, folder: Path) -> list[Any] | None:
    """The facts and metrics of a run's newest checkpoint; None where there is none.

    Raises UserError for a finished run without one, which would begin again.
    """
    if snapshot is not None:
        return [snapshot.facts.to_json(), snapshot.metrics]
    if (folder / "result.json").is_file():
        raise UserError(f"{folder}: is finished and has no intact checkpoint to go on from; choose another run.dir")
    if checkpoints.any():
        warn(f"{folder}: no checkpoint is intact; the run starts from round 1")
    return None


def _describe(job: Job, given: Recipe, folder: Path) -> None:
    """Writes partition.json, and then recipe.yaml, the resolved recipe: check_folder reads both.

    Of `given` it keeps CHOSEN_KEYS, so that a run that was interrupted has the recipe of one that was not. The run's
    own choice is in its checkpoints.

    result.json goes first, where a finished run goes on: without it the folder is that of an unfinished run, whichever
    of the two recipes it holds.
    """
    if (folder / "result.json").is_file():
        (folder / "result.json").unlink()
        sync(folder)
    replace_text(folder / "partition.json", json.dumps(partition_summary(job)) + "\n")
    asked = {key: getattr(given.run, key) for key in CHOSEN_KEYS}
    replace_text(folder / "recipe.yaml", replace(job.recipe, run=replace(job.recipe.run, **asked)).yaml())


def _empty_folder(folder: Path, executor: Executor) -> Path:
    """A new, empty folder for the vectors that clients keep while the run lasts."""

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    executor.on_first(make)
    return folder.resolve()


def _begin(job: Job, folder: Path, executor: Executor, files: Path) -> Session:
    """A new run, before its first round."""
    began, shares = time.perf_counter(), _shares(job.recipe, executor)
    with stage("full local gradients at x0" if job.algorithm.needs_full_gradient() else "starting"):
        state = start(job.setup, stacked_clients=job.stacked_clients, parts=shares, executor=executor, folder=files)
    facts = RunFacts(
        stacked_clients=job.stacked_clients,
        slices=job.recipe.run.slices,
        threads=job.machine.threads,
        precision=job.machine.precision,
        data=job.data,
        labels=list(job.task.classes),
        start=executor.on_first(lambda: start_costs(job, time.perf_counter() - began)),
        shares=shares,
        head=job.backbone.start.setting,
        base=job.base_digest(),
        privacy=decided_privacy(job.recipe),
    )
    return Session(job, folder, executor, state, facts, [])


def _resume(
    job: Job, folder: Path, executor: Executor, files: Path, facts: RunFacts, snapshot: Snapshot | None
) -> Session:
    """A run after the last round of its newest checkpoint. snapshot: that checkpoint, on rank 0."""
    state = blank(job.setup, folder=files)
    executor.on_first(lambda: None if snapshot is None else snapshot.restore(state))
    beside = {} if state.buffers is None else {BUFFERS: state.buffers}
    server = {f"server/{name}": value for name, value in state.server.items()}
    found = executor.from_first({"x": state.x, **beside, **server})
    state.x, state.server = found["x"], {name: found[f"server/{name}"] for name in state.server}
    state.buffers = found.get(BUFFERS)
    state.round = executor.on_first(lambda: state.round)
    vectors = describe(state.clients.known()) if executor.rank == 0 else []
    _, notes = executor.together(lambda: (None, vectors), lambda rank: "reading the checkpoint")
    executor.publish(state.clients, {}, notes)
    say(f"going on after round {state.round} of {job.info.total}")
    for name in ("threads", "precision"):
        if (before := getattr(facts, name)) != (now := getattr(job.machine, name)):
            warn(f"the rounds before had {name} {before}, here it is {now}: the run is no longer bit for bit the same")
    facts.stacked_clients = job.stacked_clients
    job.problem.eval_cuts = facts.eval_cuts
    shares = _shares(job.recipe, executor)
    if facts.shares < min(shares, executor.size):
        warn(f"the rounds before had {facts.shares} shares, now {shares}: the run is no longer bit for bit the same")
        facts.shares = shares
    return Session(job, folder, executor, state, facts, [])


def _shares(recipe: Recipe, executor: Executor) -> int:
    """The parts that a new run deals its clients into."""
    return executor.size if recipe.run.shares == "auto" else recipe.run.shares
