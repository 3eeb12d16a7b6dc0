"""A run under way: how it begins, and how it goes on from a checkpoint."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedllm.common.console import say, stage, warn
from fedllm.config.recipe import Recipe
from fedllm.experiment.build import Job
from fedllm.experiment.checkpoints import Snapshot
from fedllm.experiment.records import (
    start_costs,
)
from fedllm.experiment.run_facts import RunFacts
from fedllm.federation.executor import Executor, describe
from fedllm.federation.rounds import start
from fedllm.federation.state import FederationState, blank
from fedllm.results.format import rounds_to


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
        """Whether all rounds are done, or the target is reached and the run stops there."""
        settings = self.job.recipe.eval
        reached = settings.stop_at_target and rounds_to(settings.target, self.metrics) is not None
        return self.state.round >= self.job.recipe.federation.rounds or reached


def empty_folder(folder: Path, executor: Executor) -> Path:
    """A new, empty folder for the vectors that clients keep while the run lasts."""

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    executor.on_first(make)
    return folder.resolve()


def begin(job: Job, folder: Path, executor: Executor, files: Path) -> Session:
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
    )
    return Session(job, folder, executor, state, facts, [])


def resume(
    job: Job, folder: Path, executor: Executor, files: Path, facts: RunFacts, snapshot: Snapshot | None
) -> Session:
    """A run after the last round of its newest checkpoint. snapshot: that checkpoint, on rank 0."""
    state = blank(job.setup, folder=files)
    executor.on_first(lambda: None if snapshot is None else snapshot.restore(state))
    found = executor.from_first({"x": state.x, **{f"server/{name}": value for name, value in state.server.items()}})
    state.x, state.server = found["x"], {name: found[f"server/{name}"] for name in state.server}
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
