"""Staying within memory: what is left of it, and work in waves that grow smaller where it gives out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from fedllm.errors import RunError

T = TypeVar("T")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still take: of the GPU, or of the machine and of the container it runs in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(int(psutil.virtual_memory().available), _left_in_container())


def total_memory(device: torch.device) -> int:
    """Bytes that the GPU has, or the machine or the container that this process runs in."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(int(psutil.virtual_memory().total), _container_limit())


def _container_limit() -> int:
    """The control group's limit (version 2)."""
    try:
        return int((_CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return 2**62


def _left_in_container() -> int:
    """What the limit leaves, file cache that can be dropped not counted as used."""
    try:
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return _container_limit() - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 2**62


def out_of_memory(error: Exception) -> bool:
    """Whether this is torch's, or Python's, way of saying that memory gave out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or should_reduce_batch_size(error)


def client_too_large(client: int) -> str:
    """What to do about a client that does not fit into memory alone."""
    return (
        f"client {client}: its step alone does not fit into memory; cut its batches with run.slices=4, or set "
        f"run.gradient_checkpointing=true (the same result up to rounding), or lower local.batch_size or "
        f"data.max_length"
    )


class Waves:
    """Clients, or samples, worked on in cohorts of at most `size` (None = all in one), one after the other.

    Where memory gives out, the same ones are worked on again in cohorts of half the size, and so are all after them.
    too_large: what to say of one that does not fit alone. forced: the size that came of it, or None.
    """

    def __init__(
        self, clients: Sequence[int], size: int | None, too_large: Callable[[int], str] = client_too_large
    ) -> None:
        self._waiting = list(clients)
        self._size = size or max(1, len(clients))
        self._too_large = too_large
        self.forced: int | None = None

    def each(self, work: Callable[[list[int]], T]) -> Iterator[tuple[list[int], T]]:
        """(cohort, what `work` gave). `work` must leave nothing behind where it fails.

        Raises RunError where one does not fit alone.
        """
        while self._waiting:
            cohort = self._waiting[: self._size]
            try:
                found = work(cohort)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._halve(cohort, error)
            else:
                del self._waiting[: len(cohort)]
                yield cohort, found
                del found  # before the next cohort makes its own
                continue
            clear_device_cache(garbage_collection=True)  # only here is the error gone, and with it what its frames held

    def _halve(self, cohort: list[int], error: Exception) -> None:
        if len(cohort) == 1:
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise RunError(f"{self._too_large(cohort[0])} ({said})") from error
        self._size = self.forced = len(cohort) // 2
