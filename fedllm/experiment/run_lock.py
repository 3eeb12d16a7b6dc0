"""One process per run folder: several may share a list of runs, and each takes those that no other one has."""

from __future__ import annotations

import contextlib
import errno
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from filelock import BaseFileLock, FileLock, LeaseCompromise, SoftFileLease, Timeout

from fedllm.common.console import say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.distributed.process_group import StoppedError

T = TypeVar("T")
OnLoss = Callable[[], None]
LOCK, LEASE = ".lock", ".lease"  # files in the run folder
LEASE_SECONDS, REFRESH_SECONDS = 180.0, 15.0  # NFS may show another host's refresh up to 60 s late
_WITHOUT_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


class RunInUseError(UserError):
    """Another process works on the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: another process is at work on this run; wait for it, or choose another run.dir")
        self.folder = folder


@contextlib.contextmanager
def run_lock(folder: Path, *, wait: bool = False, on_loss: OnLoss | None = None) -> Iterator[None]:
    """Makes a folder and locks it as long as the context lasts. A new folder into which nothing came is removed again.

    wait: until another process releases it. Raises RunInUseError where another process has it and `wait` is false.

    The lock is the kernel's on the file .lock in the folder (flock, LockFileEx), so it ends with its process, however
    that ends. The file stays, because another process may have it open already. On a file system without flock the
    lock is the file .lease, which its process refreshes every REFRESH_SECONDS. A killed process leaves it behind; it is
    void at the latest after LEASE_SECONDS without a refresh. on_loss: called in another thread if this process lost its
    lease, to end the work at once; by default it interrupts the main thread.
    """
    absent = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    lock = _acquire(folder, wait, on_loss or interrupt_main)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if absent and [*folder.iterdir()] == [folder / LOCK]:
                (folder / LOCK).unlink()  # before the release: who has opened it sees this and opens a new one
        lock.release()
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()


def _acquire(folder: Path, wait: bool, on_loss: OnLoss) -> BaseFileLock:
    kind: Callable[[Path, bool, OnLoss], BaseFileLock] = _kernel_lock
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # its last user has removed the folder since
                return kind(folder, wait, on_loss)
        except OSError as error:
            if error.errno not in _WITHOUT_FLOCK or kind is _lease:
                raise UserError(f"run.dir={folder}: cannot be made: {error}") from error
            (folder / LOCK).unlink(missing_ok=True)
            kind = _lease


def _kernel_lock(folder: Path, wait: bool, _: OnLoss) -> BaseFileLock:
    lock = FileLock(folder / LOCK, poll_interval=0.2, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise RunInUseError(folder) from None
        _say_waiting(folder)
        lock.acquire()
    return lock


def _lease(folder: Path, wait: bool, on_loss: OnLoss) -> BaseFileLock:
    """A lease on the folder. Where another process has it, waits for the next refresh even if `wait` is false: only a
    refresh tells a working process from a killed one."""

    def lost(loss: LeaseCompromise) -> None:
        warn(f"{folder}: this process stops, as it has lost {LEASE} ({loss.reason}) and another one may take the run")
        on_loss()

    lock = SoftFileLease(
        folder / LEASE,
        lease_duration=LEASE_SECONDS,
        heartbeat_interval=REFRESH_SECONDS,
        poll_interval=0.2,
        on_compromise=lost,
    )
    seen, since, waiting = _refreshed(folder), time.monotonic(), False
    while True:
        try:
            lock.acquire(timeout=REFRESH_SECONDS)
        except Timeout:
            if (found := _refreshed(folder)) != seen:
                if not wait:
                    raise RunInUseError(folder) from None
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > LEASE_SECONDS:
                lock.break_lock()  # NFS cannot exchange two names, without which filelock does not do this itself
            if not waiting:
                _say_waiting(folder)
            waiting = True
        else:
            return lock


def _refreshed(folder: Path) -> float | None:
    """When the lease was refreshed last, by the clock of the file system."""
    try:
        return (folder / LEASE).stat().st_mtime
    except FileNotFoundError:
        return None


def _say_waiting(folder: Path) -> None:
    say(f"{folder}: another process is at work on it; waiting", "dim")


def run_each_when_free(
    todo: Iterable[T],
    work: Callable[[T, bool], None],
    failed: Callable[[T, UserError | RunError], None] | None = None,
) -> None:
    """Calls work(item, wait) for each item. Those that another process is at work on come last, with `wait` true.

    failed: called with an item and its error, after which the others go on; None: the first error ends all, as a
    StoppedError always does.
    """
    busy: list[T] = []

    def attempt(item: T, wait: bool) -> None:
        try:
            work(item, wait)
        except StoppedError:
            raise
        except (UserError, RunError) as error:
            if isinstance(error, RunInUseError) and not wait:
                say(f"{error.folder}: another process is at work on it; its turn comes after the other runs", "dim")
                busy.append(item)
            elif failed is None:
                raise
            else:
                failed(item, error)

    for item in todo:
        attempt(item, False)
    for item in busy:
        attempt(item, True)
