"""Performs one run, from a recipe to a fine-tuned adapter in its run folder.

Several processes may run this program at the same time. Rank 0 makes every decision that depends on files or time
(`on_first`), and only rank 0 writes. All else is computed in every process, from the same recipe and data.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedllm.common.console import RoundProgress, console, say, say_all, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.common.profiling import Profile, end_round, running, section
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.experiment.build import Job, ReadCache, build_together, run_folder, say_notes, with_dir
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.evaluation import evaluate
from fedllm.experiment.launch import executor_for
from fedllm.experiment.plan import plan_table
from fedllm.experiment.records import (
    RoundRecord,
    append_line,
    partition_summary,
    run_result,
)
from fedllm.experiment.resume import as_before, check_data, check_folder
from fedllm.experiment.run_facts import RunFacts
from fedllm.experiment.run_lock import RunInUseError, run_lock
from fedllm.experiment.session import Session, begin, empty_folder, resume
from fedllm.experiment.trackers import Trackers, require_installed
from fedllm.federation.executor import Executor
from fedllm.federation.rounds import Plan, RoundReport, run_round
from fedllm.federation.sampling import sample
from fedllm.models.adapter_files import save_adapter
from fedllm.results.reader import load_run
from fedllm.tasks.base import lower_is_better

_CLIENTS = "clients"  # subfolder of the run folder, removed when the run ends; checkpoints link its files


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, result.json as a dict, and metrics.jsonl as a list with one dict per round."""

    folder: Path
    result: dict[str, Any]
    metrics: list[dict[str, Any]]


def run_recipe(
    path: str | Path, overrides: Sequence[str] = (), run_dir: str | Path | None = None, *, profile: bool = False
) -> RunResult:
    """Runs the recipe in a file with overrides "section.key=value" on top; the same as `fedllm run`.

    run_dir: the run folder; replaces the recipe's run.dir. An interrupted run continues from its last intact checkpoint
    (run.resume: auto). A finished run is read and returned. profile: see `run`. Under torchrun or accelerate launch,
    every process calls this, and all share the work.
    Raises UserError for mistakes in the arguments, RunError for a run that cannot continue.
    """
    return run(with_dir(load_recipe(path, overrides), run_dir), profile=profile)


def dry_run(recipe: Recipe, executor: Executor | None = None) -> None:
    """Builds everything up to the first step and prints the plan."""
    executor = executor or executor_for(recipe.run)
    executor.on_first(lambda: check_folder(run_folder(recipe), recipe))
    say_notes(recipe)
    require_installed(recipe.run.trackers)
    console.print(plan_table(build_together(recipe, None, executor)))


def run(
    recipe: Recipe,
    cache: ReadCache | None = None,
    executor: Executor | None = None,
    *,
    profile: bool = False,
    wait: bool = False,
) -> RunResult:
    """Runs a recipe; see run_recipe.

    cache: data shared with other recipes of the same process. executor: the processes that share the work, by default
    all processes of the launcher. profile: measures this process's time per section, prints it at the end and writes it
    to profile.json in the run folder. wait: if another command runs this recipe, waits until that command ends instead
    of raising RunInUseError.
    """
    executor = executor or executor_for(recipe.run)
    folder = run_folder(recipe)
    executor.on_first(lambda: check_folder(folder, recipe))
    with _held(folder, executor, wait):
        if executor.on_first((folder / "result.json").is_file):
            finished = RunResult(folder, *executor.on_first(lambda: _read(folder)))
            say(f"{folder} is finished already; its result stands. For a new run choose another run.dir")
            executor.on_first(lambda: None if (folder / "curves.png").is_file() else _plot(folder))
            return finished
        return _run(recipe, folder, cache, executor, profile)


@contextmanager
def _held(folder: Path, executor: Executor, wait: bool) -> Iterator[None]:
    """Holds the run folder's lock, on rank 0.

    With several processes it never waits for the lock: the other processes would wait for rank 0 for hours.
    """
    with ExitStack() as stack:

        def take() -> bool:
            try:
                stack.enter_context(run_lock(folder, wait=wait and executor.size == 1))
            except RunInUseError:
                return False
            return True

        if not executor.on_first(take):
            raise RunInUseError(folder)
        yield


def _run(recipe: Recipe, folder: Path, cache: ReadCache | None, executor: Executor, profile: bool) -> RunResult:
    say_notes(recipe)
    require_installed(recipe.run.trackers)
    checkpoints = Checkpoints(folder / "checkpoints", warn)
    snapshot = checkpoints.latest() if executor.rank == 0 else None
    before: Any = executor.on_first(lambda: None if snapshot is None else [snapshot.facts.to_json(), snapshot.metrics])
    facts = None if before is None else RunFacts.from_json(before[0])
    job = build_together(as_before(recipe, facts), cache, executor)
    if facts is not None:
        check_data(job, facts, folder)
    say_all(job.notes, job.dataset.warnings)
    executor.on_first(lambda: _describe(job, folder))
    files = executor.share_folder(empty_folder(folder / _CLIENTS, executor))
    if facts is None:
        session = begin(job, folder, executor, files)
    else:
        session = resume(job, folder, executor, files, facts, snapshot)
        session.metrics = before[1]
    executor.on_first(lambda: replace_text(folder / "start.json", json.dumps(session.facts.start) + "\n"))
    watch = None
    if profile and executor.rank == 0:
        path = folder / "profile.json"
        watch = Profile(path, job.machine.device, done=session.state.round, processes=executor.size)
    _train(session, checkpoints, watch)
    result = _finish(session)
    if watch is not None and watch.rounds:
        console.print(watch.table())
    return result


def _describe(job: Job, folder: Path) -> None:
    """Writes partition.json, and then recipe.yaml, the resolved recipe: check_folder reads both."""
    replace_text(folder / "partition.json", json.dumps(partition_summary(job)) + "\n")
    replace_text(folder / "recipe.yaml", job.recipe.yaml())


def _train(session: Session, checkpoints: Checkpoints, profile: Profile | None) -> None:
    """Trains all remaining rounds. All files of a round are on disk before the next round begins."""
    job, state, executor, folder = session.job, session.state, session.executor, session.folder
    recipe, info, path = job.recipe, job.info, folder / "metrics.jsonl"
    executor.on_first(lambda: replace_text(path, "".join(json.dumps(line) + "\n" for line in session.metrics)))
    names = recipe.run.trackers if executor.rank == 0 else []
    trackers = Trackers(names, folder, state.round, recipe.sections())
    with RoundProgress(info.total, state.round) as progress, trackers, running(profile):
        plan = Plan(
            session.facts.stacked_clients,
            recipe.federation.min_clients,
            progress.step,
            session.facts.shares,
            executor,
        )
        while not session.complete:
            began = time.perf_counter()
            clients, tracked = sample(recipe.run.seed, state.round, info.num_clients, info.sampled, info.tracked)
            report = run_round(job.setup, state, clients, tracked, plan)
            for client, why in report.rejected.items():
                warn(f"round {state.round}: client {client} rejected: {why}")
            plan = _step_down(session, plan, report)
            record = RoundRecord.of(job, state.round, report, time.perf_counter() - began)
            if state.round % recipe.eval.every == 0 or state.round == info.total:
                with section("evaluate"):
                    record = replace(record, scores=evaluate(job, state, executor))
                _note_cuts(session)
            line = executor.on_first(lambda record=record: append_line(path, record.line()))  # type: ignore[misc]
            session.metrics.append(line)
            trackers.write(line)
            progress.finish(state.round, _note(session))
            if session.complete or state.round % recipe.run.checkpoint_every == 0:
                with section("checkpoint"):
                    _save(session, checkpoints)
            end_round(state.round)


def _save(session: Session, checkpoints: Checkpoints) -> None:
    """Writes a checkpoint on rank 0, after it has collected all clients' vectors."""
    session.executor.fetch(session.state.clients)
    session.executor.on_first(lambda: checkpoints.save(session.state, session.metrics, session.facts).name)


def _step_down(session: Session, plan: Plan, report: RoundReport) -> Plan:
    """The plan, with fewer clients trained together if a process ran out of memory. A resumed run uses it too."""
    if (forced := report.forced) is None:
        return plan
    round = session.state.round
    warn(
        f"round {round}: {plan.stacked_clients} clients together do not fit into memory; that round was done with "
        f"{forced} together, and so will be the rest (the same result up to rounding)"
    )
    session.facts.stacked_clients = forced
    session.facts.stepped_down.append({"round": round, "stacked_clients": forced})
    return replace(plan, stacked_clients=forced)


def _note_cuts(session: Session) -> None:
    """Prints and records that some process ran out of memory in an evaluation and used smaller batches."""
    cuts, round = session.job.problem.eval_cuts, session.state.round
    if cuts == session.facts.eval_cuts:
        return
    warn(
        f"round {round}: the batches of the evaluation do not fit into memory; they are cut into {cuts} from here on "
        f"(the same result up to rounding)"
    )
    session.facts.eval_cuts = cuts
    session.facts.stepped_down.append({"round": round, "eval_cuts": cuts})


def _note(session: Session) -> str:
    """A short text with the last round's figures."""
    primary = session.job.task.primary
    best = min if lower_is_better(primary) else max
    scores = [line[primary] for line in session.metrics if line.get(primary) is not None]
    loss = session.metrics[-1]["train_loss"]
    parts = [f"train loss {loss:.4f}"] if loss is not None else []
    return "  ".join([*parts, *([f"{primary} {scores[-1]:.4f} (best {best(scores):.4f})"] if scores else [])])


def _finish(session: Session) -> RunResult:
    """Writes the adapter, result.json and the plot."""
    job = session.job
    job.problem.space.scatter(job.model, session.state.x)
    try:
        result = session.executor.on_first(lambda: _write_result(session))
    finally:
        job.problem.release()
    final = ", ".join(f"{name} {value:.4f}" for name, value in result["final"].items() if value is not None)
    say(f"{session.folder}: {final} after {session.state.round} rounds", "bold")
    say(f"adapter in {session.folder / 'adapter'}, curves in {session.folder / 'curves.png'}")
    return RunResult(session.folder, result, session.metrics)


def _write_result(session: Session) -> dict[str, Any]:
    """Writes the adapter, then result.json. So if result.json exists, all other files exist, except the plot."""
    job, folder = session.job, session.folder
    try:
        save_adapter(job.model, folder / "adapter", job.backbone.base_name, job.backbone.tokenizer)
        result = run_result(job, session.state, session.metrics, session.facts)
        shutil.rmtree(folder / _CLIENTS, ignore_errors=True)
        replace_text(folder / "result.json", json.dumps(result, indent=2) + "\n")
        _plot(folder)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {error}; the last checkpoint is intact") from error
    return result


def _plot(folder: Path) -> None:
    """Plots a run. Matplotlib is imported here because its import takes half a second."""
    from fedllm.reporting.run_curves import plot_run

    plot_run(folder)


def _read(folder: Path) -> list[Any]:
    """Reads result.json and the lines of metrics.jsonl. Raises RunError if they are damaged."""
    try:
        load_run(folder)
    except UserError as error:
        advice = "remove its result.json, and the same command makes it again from the last checkpoint"
        raise RunError(f"{error}; {advice}") from error
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads((folder / "result.json").read_text(encoding="utf-8")), [json.loads(line) for line in lines]]
