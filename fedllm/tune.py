"""`fedllm tune`: which cohort size and how many slices are fastest here, measured on the recipe's own work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from fedllm.assemble import Job, assemble
from fedllm.console import console, say, stage
from fedllm.errors import RunError, UserError
from fedllm.files import replace_text
from fedllm.processes import size as processes
from fedllm.recipe import CHOSEN_KEYS, Recipe, load_recipe
from fedllm.recipe_edit import with_keys
from fedllm.rounds import Federation, blank, local_steps, sample
from fedllm.sizing import Need, usable_memory
from fedllm.training import deal, train_share

STEPS = 2  # local steps of each client that are timed
REPEATS = 3
CLEAR = 0.97  # of the best speed: what is as fast as this is as good, and the smallest of it is taken

Slices = int | str


@dataclass(frozen=True)
class Trial:
    """One setting. packed: whether rows hold several samples with it. seconds: of each repeat, in which the settings
    alternate; none where it was not tried. need: bytes by the estimate."""

    cohort: int
    slices: Slices
    packed: bool
    need: int
    seconds: list[float] = field(default_factory=list)
    fits: bool = True

    @property
    def rows(self) -> str:
        """How the samples are laid out, in words."""
        if self.packed:
            return "packed"
        if isinstance(self.slices, str):
            return "padded, best cut"
        return f"padded, {self.slices} slice{'s' * (self.slices > 1)}"


def tune(path: Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> None:
    """Measures, prints a table, and writes run.cohort and run.slices into the recipe's file unless `dry_run`.

    Neither touches more than the rounding of a number. Raises UserError, before anything is measured, for a recipe that
    cannot be tuned.
    """
    recipe = load_recipe(path, overrides)
    _require_tunable(path, recipe, overrides, dry_run)
    job = assemble(recipe)
    for note in job.task.notes:
        say(note, "dim")
    work = Work.of(job)
    *searched, best = search(work, recipe.run.slices)
    console.print(table(searched, best, work))
    chosen = {"cohort": best.cohort, "slices": best.slices}
    said = " ".join(f"run.{name}={value}" for name, value in chosen.items())
    machine = f"{job.machine.device.type}, {job.machine.precision}"
    if others := [word for word in overrides if not word.startswith("run.")]:
        say(f"measured with {' '.join(others)}")
    if dry_run:
        say(f"best: {said}; the recipe stays as it is (--dry-run)", "bold")
        return
    file = path.resolve()
    replace_text(file, with_keys(_read(file), "run", chosen, str(path)))
    say(f"{path}: now has {said}, the best on this machine ({machine})", "bold")


def _require_tunable(path: Path, recipe: Recipe, overrides: Sequence[str], dry_run: bool) -> None:
    if processes() > 1:
        raise UserError("tune measures one process; start it without a launcher")
    for name in CHOSEN_KEYS:
        if any(word.partition("=")[0].strip() == f"run.{name}" for word in overrides):
            raise UserError(f"run.{name}: is what tune chooses; leave the override out")
    if (path.parent / "metrics.jsonl").is_file():
        raise UserError(f"{path}: is the record of a run, which keeps what it chose; tune the recipe that it came from")
    if recipe.federation.clients_per_round == 1 and recipe.local.batch_size == 1:
        raise UserError(
            "nothing to tune: one client a round (federation.clients_per_round) with batches of one sample "
            "(local.batch_size) can be cut in one way only"
        )
    if dry_run:
        return
    with_keys(_read(path), "run", {"cohort": 1, "slices": "auto"}, str(path))
    if not (os.access(path, os.W_OK) and os.access(path.resolve().parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; make it writable, or see what is best with --dry-run")


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


@dataclass(frozen=True)
class Work:
    """What is timed: the first steps of a round's clients, as many of them as one process trains of it."""

    job: Job
    federation: Federation
    steps: dict[int, int]
    need: Need

    @classmethod
    def of(cls, job: Job) -> Work:
        """The clients of round 1, or the first share of them."""
        info, shares = job.info, job.recipe.run.shares
        clients, _ = sample(job.recipe.run.seed, 0, info.num_clients, info.sampled, info.tracked)
        steps = local_steps(job.problem, clients, info)
        share = deal(steps, 1 if shares == "auto" else shares)[0]
        limited = {client: min(steps[client], STEPS) for client in share}
        falling = dict(sorted(limited.items(), key=lambda pair: -pair[1]))
        need = Need.of(job.algorithm, job.problem)
        return cls(job, blank(job.algorithm, job.problem, info), falling, need)

    @property
    def client_steps(self) -> int:
        """Client-steps of a trial."""
        return sum(self.steps.values())

    def trial(self, cohort: int, slices: Slices) -> Trial:
        """A setting with the memory that it is thought to need, not timed yet."""
        problem, device = self.job.problem, self.job.machine.device
        self._cut(slices)
        need = self.need.of_cohort(problem, cohort)
        return Trial(cohort, slices, problem.layout is not None, need, fits=need <= usable_memory(device))

    def seconds(self, trial: Trial) -> float | None:
        """Seconds of the work, or None where it does not fit into memory."""
        job = self.job
        self._cut(trial.slices)
        began = time.perf_counter()
        try:
            share = train_share(
                job.algorithm, job.problem, self.federation, job.info, self.steps, set(self.steps), trial.cohort,
                lambda steps: None,
            )  # fmt: skip
        except RunError:
            return None
        if job.machine.device.type == "cuda":
            torch.cuda.synchronize()
        return None if share.forced else time.perf_counter() - began

    def _cut(self, slices: Slices) -> None:
        self.job.problem.cut(None if isinstance(slices, str) else slices)


def search(work: Work, slices: Slices) -> tuple[list[Trial], list[Trial], Trial]:
    """The cohort sizes with the recipe's own slices, then the slices with the best size; and the best of these."""
    most, batch = len(work.steps), work.job.recipe.local.batch_size
    sizes = sorted({-(-most // waves) for waves in (1, 2, 4, most)})  # even waves, such as 1 3 5 10
    first = measured(work, [work.trial(size, slices) for size in sizes])
    size = fastest(first).cohort
    counts: list[Slices] = ["auto", *(count for count in (1, 2, 4) if count <= batch)]
    second = measured(work, [work.trial(size, count) for count in (slices, *(c for c in counts if c != slices))])
    return first, second, fastest(second)


def measured(work: Work, trials: list[Trial]) -> list[Trial]:
    """The trials with their times: once to warm up, then in turn, back and forth."""
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
                progress(f"measuring: cohort {trial.cohort}, {trial.rows}", done, total)
    return trials


def fastest(trials: Sequence[Trial]) -> Trial:
    """The first that is as fast as the fastest, but for the noise. Raises RunError where none fits into memory."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        raise RunError("no cohort fits into memory, not even of one client; lower local.batch_size or data.max_length")
    top = min(statistics.median(trial.seconds) for trial in fitting)
    return next(trial for trial in fitting if top >= CLEAR * statistics.median(trial.seconds))


def table(searched: Sequence[list[Trial]], best: Trial, work: Work) -> Table:
    """The trials, a line each, apart where they were not timed in turns with each other. GiB: as estimated."""
    found = Table(title=f"{work.client_steps} client-steps of {work.job.recipe.name}")
    for heading in ("cohort", "rows", "a second", "range", "GiB", ""):
        found.add_column(heading, justify="right")
    for trials in searched:
        for trial in trials:
            times = [work.client_steps / seconds for seconds in trial.seconds]
            speed = ("-", "-")
            if trial.fits:
                speed = (f"{statistics.median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}")
            note = "best" if trial is best else "" if trial.fits else "too large"
            found.add_row(str(trial.cohort), trial.rows, *speed, f"{trial.need / 2**30:.2f}", note)
        found.add_section()
    return found
