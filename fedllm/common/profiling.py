"""Measures the time of a round by section: the code says `with section("forward"): ...`, a Profile adds up the seconds.

Without a Profile a section does nothing and costs a fraction of a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.table import Table

from fedllm.common.files import replace_text

Section = Literal["data", "forward", "backward", "optimizer", "reduce", "wait", "evaluate", "checkpoint"]
SECTIONS: tuple[str, ...] = (*get_args(Section), "other")
APART = ("evaluate", "checkpoint")  # not in every round

_current: ContextVar[Profile | None] = ContextVar("profile", default=None)
_OFF = nullcontext()


def section(name: Section) -> AbstractContextManager[None]:
    """Adds the time inside to section `name`. A section inside another one counts as part of the outer one."""
    profile = _current.get()
    return _OFF if profile is None else profile.section(name)


def end_round(round: int) -> None:
    """Ends round `round` and begins the next one."""
    if (profile := _current.get()) is not None:
        profile.end_round(round)


@contextmanager
def running(profile: Profile | None) -> Iterator[None]:
    """Measures the sections inside with `profile`, if it is not None, and begins a round."""
    if profile is not None:
        profile.begin_round()
    token = _current.set(profile)
    try:
        yield
    finally:
        _current.reset(token)


class Profile:
    """The seconds of each round by section, of this process, kept in the file `path`.

    rounds: one dict per round, with round, seconds (in all) and the seconds of each of SECTIONS; `other` is the time
    outside all sections. The rounds up to `done` are read from the file. On a GPU each section waits until its work is
    done. This makes a profiled run slightly slower; its results do not change. processes: the number of processes
    that share the work; `wait` is the time that this one waits for the others.
    """

    def __init__(self, path: Path, device: torch.device, *, done: int = 0, processes: int = 1) -> None:
        self.path, self.device, self.processes = path, device, processes
        self.rounds: list[dict[str, float]] = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.rounds = [line for line in json.loads(path.read_text())["rounds"] if line["round"] <= done]
        self._within = False
        self.begin_round()

    def begin_round(self) -> None:
        """Sets all seconds to 0 and starts the clock."""
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._began = self._now()

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """See the function of this name."""
        if self._within:
            yield
            return
        self._within, began = True, self._now()
        try:
            yield
        finally:
            self._within = False
            self._seconds[name] += self._now() - began

    def end_round(self, round: int) -> None:
        """Adds the round that is over, writes the file, and begins the next round."""
        seconds = self._now() - self._began
        self._seconds["other"] = seconds - sum(self._seconds.values())
        self.rounds.append({"round": round, **_rounded({"seconds": seconds, **self._seconds})})
        self._write()
        self.begin_round()

    def mean(self) -> dict[str, float]:
        """Mean seconds per round of each of SECTIONS."""
        return {name: sum(line[name] for line in self.rounds) / len(self.rounds) for name in SECTIONS}

    def percent(self, without: Sequence[str] = ()) -> dict[str, float]:
        """Percent of a round of each of SECTIONS, as if the round had no sections `without`."""
        mean = {name: value for name, value in self.mean().items() if name not in without}
        return {name: 100 * value / sum(mean.values()) for name, value in mean.items()}

    def table(self) -> Table:
        """Seconds a round and percent of it, by section; the percents once more without those of APART."""
        mean, percent, training = self.mean(), self.percent(), self.percent(without=APART)
        whose = f" of process 0 of {self.processes}" if self.processes > 1 else ""
        table = Table(
            title=f"where the time of {len(self.rounds)} rounds went{whose}, {self.device}",
            caption=f"training: without {' and '.join(APART)}, which are not in every round",
        )
        for heading in ("section", "s a round", "% of all", "% of training"):
            table.add_column(heading, justify="left" if heading == "section" else "right")
        for name in SECTIONS:
            if mean[name] or name != "wait":
                without = f"{training[name]:.1f}" if name in training else ""
                table.add_row(name, f"{mean[name]:.4f}", f"{percent[name]:.1f}", without)
        table.add_section()
        table.add_row("all", f"{sum(mean.values()):.4f}", "100.0", "100.0")
        rest = [_overhead(found) for found in (mean, percent, training)]
        table.add_row("all but forward, backward", f"{rest[0]:.4f}", f"{rest[1]:.1f}", f"{rest[2]:.1f}")
        return table

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _write(self) -> None:
        whole = {
            "device": str(self.device),
            "processes": self.processes,
            "mean": _rounded(self.mean()),
            "percent": _rounded(self.percent()),
            "percent_of_training": _rounded(self.percent(without=APART)),
            "rounds": self.rounds,
        }
        replace_text(self.path, json.dumps(whole, indent=1) + "\n")


def _overhead(found: dict[str, float]) -> float:
    """The sum of all sections but forward and backward."""
    return sum(value for name, value in found.items() if name not in ("forward", "backward"))


def _rounded(found: dict[str, float]) -> dict[str, float]:
    """The values rounded to six decimals: microseconds."""
    return {name: round(value, 6) for name, value in found.items()}
