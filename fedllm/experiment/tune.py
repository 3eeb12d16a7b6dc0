"""`fedllm tune`: how many clients together and how many slices are fastest, measured on the recipe's own work.

With all weights trained there are no slices to choose, and clients are together where torch.func can stack them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from fedllm.common.console import console, say, say_all, stage
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.config.recipe import ALIASES, CHOSEN_KEYS, Recipe, load_recipe
from fedllm.config.yaml_edit import with_keys
from fedllm.config.yaml_layers import parse_yaml
from fedllm.experiment.build import build_together, say_notes
from fedllm.experiment.full_memory import FullNeed
from fedllm.experiment.job import Job
from fedllm.experiment.launch import executor_for
from fedllm.experiment.memory_plan import Need, usable_memory
from fedllm.experiment.sample_privacy import sample_level
from fedllm.federation.executor import Executor
from fedllm.federation.local_training import local_steps, train_part
from fedllm.federation.sampling import deal, sample
from fedllm.federation.state import FederationState, blank
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.full.stacked_step import require_stackable
from fedllm.problems.lora.problem import LoraProblem

STEPS = 2  # local steps of each client that are timed
REPEATS = 3
CLEAR = 0.97  # settings with at least this fraction of the best speed count as equal

Slices = int | str


@dataclass(frozen=True)
class Trial:
    """One setting.

    packed: whether rows hold several samples with it. plain: whether all weights are trained. seconds: of each repeat,
    in which the settings alternate; empty where it was not tried. need: bytes by the estimate. fits: whether memory
    suffices in every process.
    """

    stacked_clients: int
    slices: Slices
    packed: bool
    need: int
    seconds: list[float] = field(default_factory=list)
    fits: bool = True
    plain: bool = False

    @property
    def rows(self) -> str:
        """How the samples are laid out, in words."""
        if self.plain:
            return "padded"
        if self.packed:
            return "packed"
        if isinstance(self.slices, str):
            return "padded, best cut"
        return f"padded, {self.slices} slice{'s' * (self.slices > 1)}"


def tune(path: Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> None:
    """Measures, prints a table, and writes run.stacked_clients and run.slices into the recipe's file unless `dry_run`;
    with all weights trained run.stacked_clients alone.

    Neither touches more than the rounding of a number. Raises UserError, before anything is measured, for a recipe that
    cannot be tuned.
    """
    recipe = load_recipe(path, overrides)
    _require_tunable(path, recipe, overrides, dry_run)
    executor = executor_for(recipe.run)
    say_notes(recipe)
    job = build_together(recipe, None, executor)
    say_all(job.notes, job.dataset.warnings)
    if isinstance(job.problem, FullProblem):
        _require_choice(job.problem, path)
    work = Work.of(job, executor)
    *searched, best = search(work, recipe.run.slices)
    console.print(table(searched, best, work))
    chosen: dict[str, Slices] = {"stacked_clients": best.stacked_clients}
    if not best.plain:
        chosen["slices"] = best.slices
    said = " ".join(f"run.{name}={value}" for name, value in chosen.items())
    machine = f"{job.machine.device.type}, {job.machine.precision}"
    if others := [word for word in overrides if not word.startswith("run.")]:
        say(f"measured with {' '.join(others)}")
    if dry_run:
        say(f"best: {said}; the recipe stays as it is (--dry-run)", "bold")
        return
    file = path.resolve()
    executor.on_first(lambda: replace_text(file, _edited(_read(file), chosen, path)))
    say(f"{path}: now has {said}, the best on this machine ({machine})", "bold")


def _require_tunable(path: Path, recipe: Recipe, overrides: Sequence[str], dry_run: bool) -> None:
    for word in overrides:
        section, _, name = word.partition("=")[0].strip().partition(".")
        if section == "run" and ALIASES.get((section, name), name) in CHOSEN_KEYS:
            raise UserError(f"run.{name}: is what tune chooses; leave the override out")
    if (path.parent / "metrics.jsonl").is_file():
        raise UserError(f"{path}: is the record of a run, which keeps what it chose; tune the recipe that it came from")
    if recipe.federation.clients_per_round == 1 and (recipe.local.batch_size == 1 or recipe.lora is None):
        samples = "all weights trained (lora: null)" if recipe.lora is None else "batches of one sample"
        raise UserError(
            f"nothing to tune: one client per round (federation.clients_per_round) with {samples} can be cut in one "
            f"way only"
        )
    if dry_run:
        return
    if not path.is_file():
        raise UserError(f"{path}: is no recipe file that can be written to; --dry-run shows the best settings")
    _edited(_read(path), {"stacked_clients": 1, "slices": "auto"}, path)
    if not (os.access(path, os.W_OK) and os.access(path.resolve().parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; make it writable, or see what is best with --dry-run")


def _require_choice(problem: FullProblem, path: Path) -> None:
    """Raises UserError where clients that train all weights can train one after the other only."""
    try:
        require_stackable(problem.model, problem.reader, problem.losses)
    except UserError as error:
        raise UserError(f"{path}: nothing to tune: {error}") from error


def _edited(text: str, chosen: Mapping[str, Slices], path: Path) -> str:
    """The recipe's text with these keys of `run` set, under the names that it has for them. UserError if that fails."""
    own = parse_yaml(text).get("run") or {}
    names = {key: alias for (section, alias), key in ALIASES.items() if section == "run" and alias in own}
    return with_keys(text, "run", {names.get(key, key): value for key, value in chosen.items()}, str(path))


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


@dataclass(frozen=True)
class Work:
    """The work that is timed: the first local steps of a round's clients. Each process trains the clients of its part.

    The processes work at the same time, as in a run. The slowest one gives the time.
    """

    job: Job
    executor: Executor
    federation: FederationState
    steps: dict[int, int]
    need: Need | None

    @classmethod
    def of(cls, job: Job, executor: Executor) -> Work:
        """The clients of round 1."""
        info, shares = job.info, job.recipe.run.shares
        clients, _ = sample(job.recipe.run.seed, 0, info.num_clients, info.sampled, info.tracked)
        steps = local_steps(job.problem, clients, info)
        part = executor.own(deal(steps, executor.size if shares == "auto" else shares))[0]
        limited = {client: min(steps[client], STEPS) for client in part}
        falling = dict(sorted(limited.items(), key=lambda pair: -pair[1]))
        need = None
        if isinstance(job.problem, LoraProblem):
            need = Need.of(job.algorithm, job.problem, sample_level(job.recipe) is not None)
        return cls(job, executor, blank(job.setup), falling, need)

    @property
    def client_steps(self) -> int:
        """Client-steps of a trial."""
        return sum(self.steps.values())

    def trial(self, stacked_clients: int, slices: Slices) -> Trial:
        """A setting with the memory that it is thought to need, not timed yet."""
        trial = Trial(stacked_clients, slices, False, 0, plain=isinstance(self.job.problem, FullProblem))
        self._choose(trial)
        trial = replace(trial, packed=self.job.problem.packed, need=self._need(stacked_clients))
        fits = trial.need <= usable_memory(self.job.machine.device)
        _, everywhere = self.executor.together(lambda: (None, fits), lambda rank: "measuring")
        return replace(trial, fits=all(everywhere))

    def seconds(self, trial: Trial) -> float | None:
        """Seconds of the work in the slowest process, or None where it does not fit into memory."""
        self._choose(trial)
        self.executor.together(lambda: (None, None), lambda rank: "measuring")  # all begin at once
        _, found = self.executor.together(lambda: (None, self._own_seconds(trial)), lambda rank: "measuring")
        return None if None in found else max(found)

    def _own_seconds(self, trial: Trial) -> float | None:
        began = time.perf_counter()
        try:
            part = train_part(
                self.job.setup, self.federation, self.steps, set(self.steps), trial.stacked_clients, lambda steps: None
            )
        except RunError:
            return None
        if self.job.machine.device.type == "cuda":
            torch.cuda.synchronize()
        return None if part.forced else time.perf_counter() - began

    def _need(self, stacked_clients: int) -> int:
        """Bytes that so many clients together need beside the model, by the estimate."""
        problem, job = self.job.problem, self.job
        if isinstance(problem, LoraProblem):
            assert self.need is not None
            return self.need.of_clients(problem, stacked_clients)
        private = sample_level(job.recipe) is not None
        need = FullNeed.of(job.algorithm, problem, job.info, stacked_clients, private)
        return round(need.bytes - need.model)

    def _choose(self, trial: Trial) -> None:
        """Makes the problem compute as the trial says."""
        problem = self.job.problem
        if isinstance(problem, LoraProblem):
            problem.choose_rows(None if isinstance(trial.slices, str) else trial.slices)
        else:
            problem.stacked = trial.stacked_clients > 1


def search(work: Work, slices: Slices) -> tuple[list[Trial], list[Trial], Trial]:
    """Numbers of clients with the recipe's own slices, then slices with the best number; and the best of these. With
    all weights trained, numbers of clients alone."""
    most, batch = len(work.steps), work.job.recipe.local.batch_size
    sizes = sorted({-(-most // batches) for batches in (1, 2, 4, most)})  # equal batches, such as 1 3 5 10
    first = measured(work, [work.trial(size, slices) for size in sizes])
    if isinstance(work.job.problem, FullProblem):
        return first, [], fastest(first)
    size = fastest(first).stacked_clients
    counts: list[Slices] = ["auto", *(count for count in (1, 2, 4) if count <= batch)]
    second = measured(work, [work.trial(size, count) for count in (slices, *(c for c in counts if c != slices))])
    return first, second, fastest(second)


def measured(work: Work, trials: list[Trial]) -> list[Trial]:
    """The trials with their times: once to warm up, then alternately, the order reversed in every repeat."""
    with stage("measuring") as progress:
        total, done = (1 + REPEATS) * len(trials), 0
        for repeat in range(1 + REPEATS):
            for place in range(len(trials))[:: 1 if repeat % 2 else -1]:
                trial, done = trials[place], done + 1
                if not trial.fits:
                    continue
                seconds = work.seconds(trial)
                if seconds is None:
                    trials[place] = replace(trial, fits=False)
                elif repeat:
                    trial.seconds.append(seconds)
                progress(f"measuring: {trial.stacked_clients} together, {trial.rows}", done, total)
    return trials


def fastest(trials: Sequence[Trial]) -> Trial:
    """The first that is as fast as the fastest, but for the noise. Raises RunError where none fits into memory."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        raise RunError("not even one client fits into memory; lower local.batch_size or data.max_length")
    top = min(statistics.median(trial.seconds) for trial in fitting)
    return next(trial for trial in fitting if top >= CLEAR * statistics.median(trial.seconds))


def table(searched: Sequence[list[Trial]], best: Trial, work: Work) -> Table:
    """One line per trial; a rule between trials that were not timed alternately. GiB: as estimated."""
    found = Table(title=f"{work.client_steps} client-steps of {work.job.recipe.name}")
    for heading in ("together", "rows", "per second", "range", "GiB", ""):
        found.add_column(heading, justify="right")
    for trials in searched:
        for trial in trials:
            times = [work.client_steps / seconds for seconds in trial.seconds]
            speed = ("-", "-")
            if trial.fits:
                speed = (f"{statistics.median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}")
            note = "best" if trial is best else "" if trial.fits else "too large"
            found.add_row(str(trial.stacked_clients), trial.rows, *speed, f"{trial.need / 2**30:.2f}", note)
        found.add_section()
    return found
