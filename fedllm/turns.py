"""One process a run folder: several may work on the same list of runs, each taking those that no other one has."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from fedllm.console import say
from fedllm.errors import UserError

T = TypeVar("T")


class BusyError(UserError):
    """Another process is at work on the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: another process is at work on this run; wait for it, or choose another run.dir")
        self.folder = folder


@contextlib.contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Makes a folder and holds it as long as the context lasts; it is removed again if nothing came into it.

    A process that ends lets go, however it ends. wait: until another one lets go. Raises BusyError where one has it and
    `wait` is false. On a file system without locks every process is alone.
    """
    absent = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    while True:
        with _opened(folder) as descriptor:
            _hold(descriptor, folder, wait)
            if not _is(descriptor, folder):
                continue  # who held it has removed it again
            try:
                yield
            finally:
                for path in absent:
                    with contextlib.suppress(OSError):
                        path.rmdir()
            return


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"run.dir={folder}: cannot be made: {error}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _hold(descriptor: int, folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise BusyError(folder) from None
        say(f"{folder}: another process is at work on it; waiting", "dim")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def in_turn(todo: Iterable[T], work: Callable[[T, bool], None]) -> None:
    """work(item, wait) for each; what another process is at work on comes last, once that one has let go of it."""
    busy: list[T] = []
    for item in todo:
        try:
            work(item, False)
        except BusyError as error:
            say(f"{error.folder}: another process is at work on it; it comes last", "dim")
            busy.append(item)
    for item in busy:
        work(item, True)
