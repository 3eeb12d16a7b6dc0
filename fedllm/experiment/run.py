"""Performs one run, from a recipe to a fine-tuned adapter or model in its run folder.

Several processes may run this program at the same time. Rank 0 makes every decision that depends on files or time
(`on_first`), and only rank 0 writes. All else is computed in every process, from the same recipe and data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedllm.common.console import console, say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.common.profiling import Profile
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.experiment.answers import write_answers
from fedllm.experiment.build import ReadCache, run_folder, say_notes, with_dir
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.client_scores import settle_own
from fedllm.experiment.comparison import compare
from fedllm.experiment.flower_engine import FlowerSimulation, flower_simulation
from fedllm.experiment.job import Job
from fedllm.experiment.launch import executor_for
from fedllm.experiment.model_card import TrainedOn, model_card
from fedllm.experiment.plan import plan_rows, plan_table
from fedllm.experiment.records import run_result
from fedllm.experiment.resume import OtherRunError, check_folder
from fedllm.experiment.round_source import RoundSource
from fedllm.experiment.run_lock import RunInUseError, run_lock
from fedllm.experiment.session import CLIENTS, Session, ended_by, open_session
from fedllm.experiment.stopping import StopRequests, stop_requests
from fedllm.experiment.trackers import require_installed
from fedllm.experiment.trained_files import save_trained
from fedllm.experiment.training import ThisMachine, train
from fedllm.federation.executor import Executor
from fedllm.models.norms import write_statistics
from fedllm.results.reader import load_run


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
    (run.resume: auto). A finished run is read and returned; with more federation.rounds it goes on, if its rates do not
    depend on their number. profile: see `run`. Under torchrun or accelerate launch, every process calls this, and all
    share the work.
    Raises UserError for mistakes in the arguments, RunError for a run that cannot continue, KeyboardInterrupt for one
    that a signal or run.max_hours ended: after a round, with a checkpoint.
    """
    return run(with_dir(load_recipe(path, overrides), run_dir), profile=profile)


def plan_run(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The plan of a recipe's run, which `fedllm run --dry-run` prints: name -> text.

    Builds everything up to the first step, and writes nothing. Raises UserError for mistakes in the arguments."""
    return plan_rows(_planned(load_recipe(path, overrides)))


def dry_run(recipe: Recipe, executor: Executor | None = None, source: RoundSource | None = None) -> None:
    """Builds everything up to the first step and prints the plan. It says so if the folder holds another run.

    source: see run."""
    console.print(plan_table(_planned(recipe, executor, source)))


def _planned(recipe: Recipe, executor: Executor | None = None, source: RoundSource | None = None) -> Job:
    executor = executor or executor_for(recipe.run)
    source = source or (FlowerSimulation() if recipe.run.engine == "flower" else ThisMachine())

    def look() -> None:
        try:
            check_folder(run_folder(recipe), recipe)
        except OtherRunError as error:
            warn(str(error))

    executor.on_first(look)
    say_notes(recipe)
    require_installed(recipe.run.trackers)
    return source.build(recipe, None, executor)


def run(
    recipe: Recipe,
    cache: ReadCache | None = None,
    executor: Executor | None = None,
    *,
    profile: bool = False,
    wait: bool = False,
    stop: StopRequests | None = None,
    source: RoundSource | None = None,
) -> RunResult:
    """Runs a recipe; see run_recipe.

    cache: data shared with other recipes of the same process. executor: the processes that share the work, by default
    all processes of the launcher. profile: measures this process's time per section, prints it at the end and writes it
    to profile.json in the run folder. wait: if another command runs this recipe, waits until that command ends instead
    of raising RunInUseError. stop: the stop requests of a command with several runs, by default of this run alone.
    source: what computes the rounds, by default this machine, or Flower's simulation where run.engine asks for it.
    """
    executor = executor or executor_for(recipe.run)
    if source is None and recipe.run.engine == "flower":
        with flower_simulation() as source:
            return run(recipe, cache, executor, profile=profile, wait=wait, stop=stop, source=source)
    source = source or ThisMachine()
    if stop is None:
        with stop_requests(executor.size) as stop:
            return run(recipe, cache, executor, profile=profile, wait=wait, stop=stop, source=source)
    folder = run_folder(recipe)
    say_notes(recipe)
    moved = executor.on_first(lambda: check_folder(folder, recipe))
    with _held(folder, executor, wait, stop):
        finished = executor.on_first(lambda: None if moved else _read_finished(folder, recipe))
        if finished is not None:
            say(f"{folder} is finished already; its result stands. For a new run choose another run.dir")
            executor.on_first(lambda: None if (folder / "curves.png").is_file() else _plot(folder))
            return RunResult(folder, *finished)
        checkpoints = Checkpoints(folder / "checkpoints", warn)
        with _telling_what_is_kept(checkpoints, executor):
            session = open_session(recipe, folder, executor, checkpoints, source, moved, cache)
            return _complete(session, checkpoints, source, profile, stop)


@contextmanager
def _held(folder: Path, executor: Executor, wait: bool, stop: StopRequests) -> Iterator[None]:
    """Holds the run folder's lock, on rank 0.

    With several processes it never waits for the lock: the other processes would wait for rank 0 for hours.
    """
    with ExitStack() as stack:

        def take() -> bool:
            try:
                stack.enter_context(run_lock(folder, wait=wait and executor.size == 1, on_loss=stop.end_at_once))
            except RunInUseError:
                return False
            return True

        if not executor.on_first(take):
            raise RunInUseError(folder)
        yield


@contextmanager
def _telling_what_is_kept(checkpoints: Checkpoints, executor: Executor) -> Iterator[None]:
    """Adds to an error of a run, on rank 0, from which round the same command goes on."""
    try:
        yield
    except RunError as error:
        if executor.rank:
            raise
        text = str(error).rstrip(".")
        separator = "\n" if "\n" in text else ". "
        raise type(error)(f"{text}{separator}{checkpoints.kept()}") from error


def _complete(
    session: Session, checkpoints: Checkpoints, source: RoundSource, profile: bool, stop: StopRequests
) -> RunResult:
    """Trains the remaining rounds and writes the result."""
    watch = None
    if profile and session.executor.rank == 0:
        path, done = session.folder / "profile.json", session.state.round
        watch = Profile(path, session.job.machine.device, done=done, processes=session.executor.size)
    train(session, checkpoints, source, watch, stop)
    result = _finish(session)
    if watch is not None and watch.rounds:
        console.print(watch.table())
    return result


def _finish(session: Session) -> RunResult:
    """Writes the adapter or the model, the answers, result.json and the plot."""
    job, x, buffers = session.job, session.state.x, session.state.buffers
    compared = compare(job, x, session.executor, buffers) | settle_own(session)
    job.problem.space.scatter(job.model, x)
    if buffers is not None:
        write_statistics(job.model, buffers)
    job.problem.release()
    result = session.executor.on_first(lambda: _write_result(session, compared))
    final = ", ".join(f"{name} {value:.4f}" for name, value in result["final"].items() if value is not None)
    say(f"{session.folder}: {final} after {session.state.round} rounds", "bold")
    trained = job.recipe.trained_folder
    say(f"{trained} in {session.folder / trained}, curves in {session.folder / 'curves.png'}")
    if result["ended_by"] == "patience":
        best = result["best"].get(session.best_by)
        since = f", which was {best['value']:.4f} in round {best['round']}" if best else ""
        say(f"ended after {job.recipe.eval.patience} evaluations without a better {session.best_by}{since}")
    _warn_of_missed_target(session, result)
    return RunResult(session.folder, result, session.metrics)


def _warn_of_missed_target(session: Session, result: dict[str, Any]) -> None:
    """Warns where the run was to stop at its target and did not reach it."""
    settings = session.job.recipe.eval
    if not settings.stop_at_target or result["rounds_to_target"] is not None:
        return
    best = {name: result["best"].get(name) for name in settings.target or {}}
    missed = [
        f"{name}={settings.target[name]:g}, the best was "  # type: ignore[index]
        + (f"{found['value']:.4f} in round {found['round']}" if found else "never a number")
        for name, found in best.items()
    ]
    warn(f"warning: {session.folder}: eval.target not reached in {result['rounds']} rounds: {'; '.join(missed)}")


def _write_result(session: Session, compared: dict[str, Any]) -> dict[str, Any]:
    """Writes the adapter or the model, the answers, then result.json with the entries `compared`.

    So if result.json exists, all other files exist, except the plot.
    """
    job, folder = session.job, session.folder
    try:
        trained = TrainedOn(session.metrics, session.facts.data, len(job.parts), job.problem.dim)
        card = model_card(job.recipe, job.backbone, job.task, trained)
        save_trained(job.recipe, job.model, folder / job.recipe.trained_folder, job.backbone, job.task, card)
        write_answers(job, session.state.x, folder)
        ended = {"best_by": session.best_by, "ended_by": _ended_by(session)}
        result = run_result(job, session.state, session.metrics, session.facts) | ended | compared
        shutil.rmtree(folder / CLIENTS, ignore_errors=True)
        replace_text(folder / "result.json", json.dumps(result, indent=2) + "\n")
        _plot(folder)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {error}; make room") from error
    return result


def _ended_by(session: Session) -> str:
    """What ended the run: "rounds", "target", "patience", or "epsilon" where the next round would exceed the budget."""
    return ended_by(session.job.recipe, session.best_by, session.metrics) or "epsilon"


def _plot(folder: Path) -> None:
    """Plots a run. Matplotlib is imported here because its import takes half a second."""
    from fedllm.reporting.run_curves import plot_run

    plot_run(folder)


def _read_finished(folder: Path, recipe: Recipe) -> list[Any] | None:
    """result.json and the lines of metrics.jsonl, if the run in the folder is all that the recipe asks for.

    Raises RunError if they are damaged.
    """
    if not (folder / "result.json").is_file():
        return None
    try:
        load_run(folder)
    except UserError as error:
        advice = "remove its result.json, and the same command makes it again from the last checkpoint"
        raise RunError(f"{error}; {advice}") from error
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    by_budget = result.get("privacy", {}).get("ended_by_budget")
    if ended_by(recipe, recipe.eval.metric or result["primary"], metrics) is None and not by_budget:
        return None
    return [result, metrics]
