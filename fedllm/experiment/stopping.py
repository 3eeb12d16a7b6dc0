"""Requests to end a run early: signals, and run.max_hours. A round that is under way is finished first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedllm.common.errors import Interrupted
from fedllm.distributed.process_group import rank, under_torchrun
from fedllm.federation.executor import Executor

TIME_OVER = 75  # exit code, EX_TEMPFAIL of sysexits.h: not an error, try again later
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_COPY_SECONDS = 2.0  # torchrun sends its processes the Ctrl-C that the terminal has sent them already


class Reason(NamedTuple):
    """Why a run ends early, and the exit code of that."""

    text: str
    exit_code: int


class StopRequests:
    """Whether this command was asked to end. began: time.monotonic() from which run.max_hours counts.

    A signal ends a run after the round that is under way. Where none is under way it raises Interrupted at once, with
    several processes only for Ctrl-C: the others are noted until all can agree after the next round. A second Ctrl-C
    raises KeyboardInterrupt at once.
    """

    def __init__(self, processes: int) -> None:
        self.began = time.monotonic()
        self._processes = processes
        self._in_rounds = self._urgent = False
        self._noted: signal.Signals | None = None
        self._noted_at = 0.0

    @contextlib.contextmanager
    def in_rounds(self) -> Iterator[None]:
        """The rounds of a run: signals are noted for `agreed`."""
        self._in_rounds = True
        try:
            yield
        finally:
            self._in_rounds = False

    def agreed(self, executor: Executor, max_hours: float | None) -> Reason | None:
        """Why the run is to end now, or None. Every process calls this, and all get the same answer."""
        mine = self._reason(max_hours if executor.rank == 0 else None)
        _, found = executor.together(lambda: (None, mine), lambda rank: "between two rounds")
        return next((Reason(*reason) for reason in found if reason), None)

    def check(self, executor: Executor, max_hours: float | None, where: str) -> None:
        """Raises Interrupted if the command is to end, for the time between the runs of a sweep."""
        if reason := self.agreed(executor, max_hours):
            raise stopped(where, reason)

    def end_at_once(self) -> None:
        """Interrupts the main thread, also in the middle of a round. Other threads call this."""
        self._urgent = True
        interrupt_main()

    def handle(self, number: int, _: object) -> None:
        """The handler of the signals."""
        again = self._noted is not None
        ctrl_c = number == signal.SIGINT
        if ctrl_c and again and under_torchrun() and time.monotonic() - self._noted_at < _COPY_SECONDS:
            return
        if self._urgent or (ctrl_c and (again or not self._in_rounds)):
            raise KeyboardInterrupt
        name = signal.Signals(number)
        if not self._in_rounds and self._processes == 1:
            raise stopped("stopped", Reason(name.name, 128 + number))
        if not again:
            self._noted, self._noted_at = name, time.monotonic()
            _announce(f"\n{name.name}: stopping after this round; Ctrl-C stops at once\n")

    def _reason(self, max_hours: float | None) -> Reason | None:
        if self._noted is not None:
            return Reason(self._noted.name, 128 + self._noted)
        if max_hours is not None and time.monotonic() - self.began >= 3600 * max_hours:
            return Reason(f"run.max_hours={max_hours:g} is over", TIME_OVER)
        return None


def stopped(what: str, reason: Reason) -> Interrupted:
    """The error that ends a command early, as all processes have agreed. what: for example "runs/a: stopped after
    round 3". Under torchrun the exit code is 0, since torchrun takes any other for a failure and starts all again."""
    return Interrupted(f"{what}; the same command goes on ({reason.text})", 0 if under_torchrun() else reason.exit_code)


@contextlib.contextmanager
def stop_requests(processes: int) -> Iterator[StopRequests]:
    """Notes signals for this command while the context lasts, if this is the main thread.

    A signal that is ignored stays ignored (nohup), but for SIGUSR1: torchrun dies of it unless started with it ignored.
    With several processes SIGTERM stays as `process_group.open_group` set it: torchrun also sends it when a process was
    lost, and then the others must end at once.
    """
    requests = StopRequests(processes)
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _handled(processes):
                before[number] = signal.signal(number, requests.handle)
        yield requests
    finally:
        for number in before:
            signal.signal(number, before[number])


def _handled(processes: int) -> list[signal.Signals]:
    found = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return [number for number in found if _is_ours(number, processes)]


def _is_ours(number: signal.Signals, processes: int) -> bool:
    if number == signal.SIGTERM and processes > 1:
        return False
    handler: Callable[..., Any] | int | None = signal.getsignal(number)
    ignored = handler is signal.SIG_IGN and number.name != "SIGUSR1"
    return handler is not None and not ignored  # None: not installed by Python, so it could not be put back


def _announce(text: str) -> None:
    """Writes to stderr from a signal handler, which may have interrupted a write to sys.stderr."""
    if rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
