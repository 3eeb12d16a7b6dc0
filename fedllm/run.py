"""One run, from a recipe to a fine-tuned adapter in its run folder. Reads as a script, top to bottom."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedllm.assemble import Job, Shelf, assemble, plan_table, run_folder, with_dir
from fedllm.console import RoundProgress, console, say, stage, warn
from fedllm.crew import Crew
from fedllm.errors import RunError, UserError
from fedllm.export import save_adapter
from fedllm.files import replace_text
from fedllm.layers import parse_yaml
from fedllm.metrics import metric_for
from fedllm.profile import Profile, end_round, running, section
from fedllm.recipe import CHOSEN_KEYS, FREE_KEYS, Recipe, load_recipe
from fedllm.records import append_line, evaluate, partition_summary, round_line, run_result, start_costs
from fedllm.results import rounds_to
from fedllm.rounds import Federation, Plan, blank, run_round, sample, start
from fedllm.state import Checkpoints, Snapshot
from fedllm.trackers import Trackers, require_installed
from fedllm.turns import alone

_CLIENTS = "clients"  # in the run folder while the run lasts; checkpoints have the same files


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, result.json as a dict, and metrics.jsonl as a list of dicts, one a round."""

    folder: Path
    result: dict[str, Any]
    metrics: list[dict[str, Any]]


def run_recipe(
    path: str | Path, overrides: Sequence[str] = (), run_dir: str | Path | None = None, *, profile: bool = False
) -> RunResult:
    """Runs the recipe in a file with overrides "section.key=value" on top; the same as `fedllm run`.

    run_dir: the run folder, over the recipe's run.dir. A run that was interrupted goes on from its last good checkpoint
    (run.resume: auto); one that is finished is read and returned. profile: see `run`.
    Raises UserError for mistakes in what was given, RunError for a run that cannot go on.
    """
    return run(with_dir(load_recipe(path, overrides), run_dir), profile=profile)


def dry_run(recipe: Recipe, crew: Crew | None = None) -> None:
    """Builds everything up to the first step and prints the plan."""
    crew = crew or Crew()
    _check_folder(run_folder(recipe), recipe)
    require_installed(recipe.run.trackers)
    console.print(plan_table(crew.assemble(recipe, lambda: assemble(recipe, processes=crew.size))))


def run(
    recipe: Recipe,
    shelf: Shelf | None = None,
    crew: Crew | None = None,
    *,
    profile: bool = False,
    wait: bool = False,
) -> RunResult:
    """Runs a recipe; see run_recipe. shelf: what it may share with the recipes run before and after it. crew: the
    processes that do it, default this one alone. profile: measure where this process's time goes, print it at the end
    and leave it in the run folder's profile.json. wait: where another process is at work on the run, until it ends,
    instead of a BusyError."""
    crew = crew or Crew()
    folder = run_folder(recipe)
    _check_folder(folder, recipe)
    with alone(folder, wait=wait and crew.size == 1):  # workers do not wait for a captain that is silent for long
        if (folder / "result.json").is_file():
            say(f"{folder} is finished already; its result stands. For a new run choose another run.dir")
            if not (folder / "curves.png").is_file():
                _plot(folder)
            return _read(folder)
        return _run(recipe, folder, shelf, crew, profile)


def _run(recipe: Recipe, folder: Path, shelf: Shelf | None, crew: Crew, profile: bool) -> RunResult:
    require_installed(recipe.run.trackers)
    checkpoints = Checkpoints(folder / "checkpoints", warn)
    snapshot = checkpoints.latest()
    chosen = _as_before(recipe, snapshot)
    job = crew.assemble(chosen, lambda: assemble(chosen, shelf, crew.size))
    if snapshot:
        _check_data(job, snapshot, folder)
    for note in job.task.notes:
        say(note, "dim")
    replace_text(folder / "recipe.yaml", recipe.yaml())
    replace_text(folder / "partition.json", json.dumps(partition_summary(job)) + "\n")
    federation, metrics, facts = _begin(job, snapshot, crew, _client_files(folder, crew))
    replace_text(folder / "start.json", json.dumps(facts["start"]) + "\n")
    watch = None
    if profile:
        watch = Profile(folder / "profile.json", job.machine.device, done=federation.round, processes=crew.size)
    _train(job, federation, metrics, facts, checkpoints, folder, crew, watch)
    result = _finish(job, federation, metrics, facts, folder)
    if watch is not None and watch.rounds:
        console.print(watch.table())
    return result


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """Refuses one that cannot be written, that holds another recipe's run, or any run where run.resume is never."""
    saved = folder / "recipe.yaml"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"run.dir={folder}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"run.dir={folder}: {there} cannot be written to; choose another run.dir")
    if not saved.is_file():
        return
    if recipe.run.resume == "never":
        raise UserError(f"{folder} holds a run, and run.resume=never asks for a new one; choose another run.dir")
    try:
        before = parse_yaml(saved.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{saved}: not readable ({error}); choose another run.dir") from error
    if not (isinstance(before, dict) and all(isinstance(keys, dict) for keys in before.values())):
        raise UserError(f"{saved}: is no recipe that fedllm wrote; choose another run.dir")
    free = FREE_KEYS | {("run", key) for key in CHOSEN_KEYS}
    differing = [
        f"{section}.{key}: {old.get(key)!r} there, {values.get(key)!r} here"
        for section, values in parse_yaml(recipe.yaml()).items()
        for old in [before.get(section, {})]
        for key in {*values, *old}
        if (section, key) not in free and old.get(key) != values.get(key)
    ]
    if differing:
        listed = "\n  ".join(sorted(differing))
        raise UserError(f"{folder} holds the run of another recipe; choose another run.dir. They differ in\n  {listed}")


def _check_data(job: Job, snapshot: Snapshot, folder: Path) -> None:
    """Refuses to go on with other data than the run began with."""
    labels, data = list(job.task.label_names), job.data
    if (named := snapshot.facts.get("labels", labels)) != labels:
        raise UserError(
            f"{folder}: the run began with the classes {', '.join(named)}, now they are {', '.join(labels)}; put the "
            f"data back as they were, or choose another run.dir"
        )
    for name, before in snapshot.facts.get("data", {}).items():
        if data[name] != before:
            what = "partition: its clients hold other samples" if name == "partition" else f"{name} split"
            raise UserError(
                f"{folder}: the run began with another {what} (sha256 {before[:12]}, now {data[name][:12]}); put "
                f"the data back as they were, or choose another run.dir"
            )


def _as_before(recipe: Recipe, snapshot: Snapshot | None) -> Recipe:
    """The recipe with the cohort size and the slices that the run began with, or came down to: with these its bits go
    on as they were, also on a machine where the rule would choose others."""
    facts = snapshot.facts if snapshot else {}
    before = {name: facts[name] for name in CHOSEN_KEYS if name in facts}
    for name, value in before.items():
        if (now := getattr(recipe.run, name)) not in ("auto", value):
            say(f"run.{name}={now} is for a new run; this one goes on with {value}")
    return replace(recipe, run=replace(recipe.run, **before))


def _client_files(folder: Path, crew: Crew) -> Path:
    """An empty folder, known to the crew, for the vectors that clients keep while the run lasts."""
    files = (folder / _CLIENTS).resolve()
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    crew.share(files)
    return files


def _begin(
    job: Job, snapshot: Snapshot | None, crew: Crew, files: Path
) -> tuple[Federation, list[dict[str, Any]], dict[str, Any]]:
    """The state to go on from, the metrics up to there, and the facts of the run that every checkpoint repeats."""
    if snapshot is None:
        began, shares = time.perf_counter(), _shares(job.recipe, crew)
        what = "full local gradients at x0" if job.algorithm.needs_full_gradient() else "starting"
        with stage(what):
            federation = start(
                job.algorithm, job.problem, job.info, cohort=job.cohort, shares=shares, crew=crew, folder=files
            )
        facts: dict[str, Any] = {
            "cohort": job.cohort,
            "slices": job.recipe.run.slices,
            "stepped_down": [],
            "eval_cuts": 1,
            "shares": shares,
            "threads": job.machine.threads,
            "precision": job.machine.precision,
            "data": job.data,
            "labels": list(job.task.label_names),
            "start": start_costs(job, time.perf_counter() - began),
        }
        return federation, [], facts
    federation = blank(job.algorithm, job.problem, job.info, folder=files)
    snapshot.restore(federation)
    say(f"going on after round {snapshot.round} of {job.info.total}")
    for name in ("threads", "precision"):
        if (before := snapshot.facts[name]) != (now := getattr(job.machine, name)):
            warn(f"the rounds before had {name} {before}, here it is {now}: the run is no longer bit for bit the same")
    facts = {"shares": 1, "stepped_down": [], "eval_cuts": 1, **snapshot.facts, "cohort": job.cohort}
    job.problem.eval_cuts = facts["eval_cuts"]
    shares = _shares(job.recipe, crew)
    if facts["shares"] < min(shares, crew.size):
        warn(f"the rounds before had {facts['shares']} shares, now {shares}: the run is no longer bit for bit the same")
        facts["shares"] = shares
    return federation, snapshot.metrics, facts


def _shares(recipe: Recipe, crew: Crew) -> int:
    """The shares that a run starts with."""
    return crew.size if recipe.run.shares == "auto" else recipe.run.shares


def _train(
    job: Job,
    federation: Federation,
    metrics: list[dict[str, Any]],
    facts: dict[str, Any],
    checkpoints: Checkpoints,
    folder: Path,
    crew: Crew,
    profile: Profile | None,
) -> None:
    """The rounds; everything a round leaves behind is on disk before the next one begins."""
    recipe, info = job.recipe, job.info
    path = folder / "metrics.jsonl"
    replace_text(path, "".join(json.dumps(line) + "\n" for line in metrics))
    trackers = Trackers(recipe.run.trackers, folder, federation.round, recipe.sections())
    with RoundProgress(info.total, federation.round) as progress, trackers, running(profile):
        plan = Plan(job.cohort, recipe.federation.min_clients, progress.step, facts["shares"], crew)
        while not _complete(recipe, federation.round, metrics):
            began = time.perf_counter()
            clients, tracked = sample(recipe.run.seed, federation.round, info.num_clients, info.sampled, info.tracked)
            report = run_round(job.algorithm, job.problem, federation, info, clients, tracked, plan)
            for client, why in report.rejected.items():
                warn(f"round {federation.round}: client {client} rejected: {why}")
            if report.forced is not None:
                plan = _step_down(plan, report.forced, facts, federation.round)
            line = round_line(job, federation.round, report, time.perf_counter() - began)
            if federation.round % recipe.eval.every == 0 or federation.round == info.total:
                with section("evaluate"):
                    line |= evaluate(job, federation, crew)
                _note_cuts(job, facts, federation.round)
            metrics.append(line)
            append_line(path, line)
            trackers.write(line)
            progress.finish(federation.round, _note(job, metrics))
            last = _complete(recipe, federation.round, metrics)
            if last or federation.round % recipe.run.checkpoint_every == 0:
                with section("checkpoint"):
                    checkpoints.save(federation, metrics, facts)
            end_round(federation.round)


def _step_down(plan: Plan, cohort: int, facts: dict[str, Any], round: int) -> Plan:
    """The plan with the cohort size that memory forced, for the rounds to come and for a run that is resumed."""
    warn(
        f"round {round}: cohorts of {plan.cohort} do not fit into memory; that round was done with cohorts of "
        f"{cohort}, and so will be the rest (the same result up to rounding)"
    )
    facts["cohort"] = cohort
    facts["stepped_down"] = [*facts["stepped_down"], {"round": round, "cohort": cohort}]
    return replace(plan, cohort=cohort)


def _note_cuts(job: Job, facts: dict[str, Any], round: int) -> None:
    """Says and keeps that memory forced smaller batches on an evaluation, here or in another process."""
    cuts = job.problem.eval_cuts
    if cuts == facts["eval_cuts"]:
        return
    warn(
        f"round {round}: the batches of the evaluation do not fit into memory; they are cut into {cuts} from here on "
        f"(the same result up to rounding)"
    )
    facts["eval_cuts"] = cuts
    facts["stepped_down"] = [*facts["stepped_down"], {"round": round, "eval_cuts": cuts}]


def _complete(recipe: Recipe, round: int, metrics: list[dict[str, Any]]) -> bool:
    reached = recipe.eval.stop_at_target and rounds_to(recipe.eval.target, metrics) is not None
    return round >= recipe.federation.rounds or reached


def _note(job: Job, metrics: list[dict[str, Any]]) -> str:
    """The last figures in a few words."""
    primary = metric_for(job.task).primary
    scores = [line[primary] for line in metrics if line.get(primary) is not None]
    loss = metrics[-1]["train_loss"]
    parts = [f"train loss {loss:.4f}"] if loss is not None else []
    return "  ".join([*parts, *([f"{primary} {scores[-1]:.4f} (best {max(scores):.4f})"] if scores else [])])


def _finish(
    job: Job, federation: Federation, metrics: list[dict[str, Any]], facts: dict[str, Any], folder: Path
) -> RunResult:
    """Leaves adapter, picture and result.json, in this order: a result.json says that all of it is there."""
    job.problem.space.scatter(job.model, federation.x)
    try:
        save_adapter(job.model, folder / "adapter", job.backbone.base_name, job.backbone.tokenizer)
        result = run_result(job, federation, metrics, facts)
        shutil.rmtree(folder / _CLIENTS, ignore_errors=True)
        replace_text(folder / "result.json", json.dumps(result, indent=2) + "\n")
        picture = _plot(folder)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {error}; the last checkpoint is intact") from error
    finally:
        job.problem.release()
    final = ", ".join(f"{name} {value:.4f}" for name, value in result["final"].items() if value is not None)
    say(f"{folder}: {final} after {federation.round} rounds", "bold")
    say(f"adapter in {folder / 'adapter'}, curves in {picture}")
    return RunResult(folder, result, metrics)


def _plot(folder: Path) -> Path:
    """The picture of a run. Matplotlib is half a second of start-up, and only wanted at the end."""
    from fedllm.run_plot import plot_run

    return plot_run(folder)


def _read(folder: Path) -> RunResult:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return RunResult(folder, result, [json.loads(line) for line in lines])
