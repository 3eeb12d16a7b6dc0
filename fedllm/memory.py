"""Staying within memory: what is left of it, and clients in cohorts that grow smaller where it gives out."""

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
    """Bytes that the GPU, or the machine, has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _left_in_container() -> int:
    """What the control group's limit leaves (version 2), file cache that can be dropped not counted as used."""
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no such group, or "max"
        return 2**62


def out_of_memory(error: Exception) -> bool:
    """Whether this is torch's, or Python's, way of saying that memory gave out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or should_reduce_batch_size(error)


class Waves:
    """Clients worked on in cohorts of at most `size` (None = all in one), one after the other.

    Where memory gives out, the same clients are worked on again in cohorts of half the size, and so are all after them.
    forced: the size that came of it, or None.
    """

    def __init__(self, clients: Sequence[int], size: int | None) -> None:
        self._waiting = list(clients)
        self._size = size or max(1, len(clients))
        self.forced: int | None = None

    def each(self, work: Callable[[list[int]], T]) -> Iterator[tuple[list[int], T]]:
        """(cohort, what `work` gave). `work` must leave nothing behind where it fails.

        Raises RunError where a client does not fit alone.
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
            raise RunError(
                f"client {cohort[0]}: its step alone does not fit into memory ({str(error).splitlines()[0]}). Cut its "
                f"batches with run.slices=4 (the same result up to rounding), or lower local.batch_size or "
                f"data.max_length"
            ) from error
        self._size = self.forced = len(cohort) // 2
