"""Console output: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

console = Console(highlight=False)
ProgressCallback = Callable[[str, int, int], None]  # what is being done, how many are done, of how many
WIDEST = 10_000  # characters: wider than any table, for those that are not to be folded
_QUIET_SECONDS = 2.0  # without output, before a plain line says what is being done
_LINE_EVERY = 10.0  # seconds between such lines in a long loop


def say(text: str, style: str = "") -> None:
    """Prints a line for the user, which is not wrapped, so that paths stay whole."""
    console.print(text, style=style or None, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Prints a warning: something went wrong, and the run goes on."""
    say(text, "yellow")


def table_width(table: Table) -> int:
    """Characters of a table's longest line where nothing is folded."""
    return Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum


def say_all(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Prints notes about choices that were made, then warnings."""
    for note in notes:
        say(note, "dim")
    for warning in warnings:
        warn(f"warning: {warning}")


@contextmanager
def stage(what: str, at_once: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A stage of preparation; yields progress(what, done, total). Says what took longer than two seconds.

    at_once: says what it does when it begins; on a terminal every stage does.
    """
    began = last = time.monotonic()

    def progress(doing: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _QUIET_SECONDS:
            last = time.monotonic()
            say(f"{doing}: {done:,} of {total:,}", "dim")

    if console.is_terminal:
        with console.status(what):
            yield progress
    else:
        if at_once:
            say(what, "dim")
        yield progress
    if (took := time.monotonic() - began) > _QUIET_SECONDS:
        say(f"{what}: {took:.1f} s", "dim")


def line_now_and_then(what: str, total: int) -> Callable[[int], None]:
    """A function that is told how much of a loop is done, and prints it every ten seconds; also beside a bar."""
    last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_EVERY:
            last = time.monotonic()
            say(f"{what}: {done:,} of {total:,}", "dim")

    return update


class LongLoop:
    """The progress of a loop that may be short: nothing for two seconds, then a bar on a terminal, and on anything else
    a line every ten seconds. It is written to stderr, since the caller's own program may use stdout."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._next = time.monotonic() + _QUIET_SECONDS
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None

    def __enter__(self) -> LongLoop:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        """Shows how many passes of the loop are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif time.monotonic() < self._next:
            return
        elif self._console.is_terminal:
            self._bar = Progress(console=self._console, transient=True)
            self._bar.add_task(self._what, total=self._total, completed=done)
            self._bar.start()
        else:
            self._next = time.monotonic() + _LINE_EVERY
            self._console.print(f"{self._what} {done:,} of {self._total:,}", style="dim")


class RoundProgress:
    """A progress bar over the rounds of a run; without a terminal, one line per round or every ten seconds."""

    def __init__(self, rounds: int, start: int) -> None:
        self._rounds, self._round, self._last = rounds, start, time.monotonic()
        self._bar = Progress(
            TextColumn(
                f"[bold]round[/] {{task.fields[round]}}/{rounds}",
                table_column=Column(no_wrap=True, min_width=len(f"round {rounds}/{rounds}")),  # on narrow terminals too
            ),
            BarColumn(),
            TextColumn("{task.fields[step]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=rounds, completed=start, round=start, step="", note="")

    def __enter__(self) -> RoundProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, done: int, total: int) -> None:
        """Shows how many of this round's client-steps are done."""
        if console.is_terminal:
            self._bar.update(self._task, completed=self._round + 0.99 * done / total, step=f"{done}/{total} steps")
        elif time.monotonic() - self._last > _LINE_EVERY:
            self._last = time.monotonic()
            say(f"round {self._round + 1}/{self._rounds}: {done} of {total} client-steps", "dim")

    def finish(self, round: int, note: str) -> None:
        """Shows that a round is done. note: its numbers in a few words."""
        self._round, self._last = round, time.monotonic()
        if console.is_terminal:
            self._bar.update(self._task, completed=round, round=round, note=note)
        else:
            say(f"round {round}/{self._rounds}  {note}")
