"""Measures free memory, and runs work in batches that are halved when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from fedllm.common.errors import RunError

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
    """Whether `error` is an out-of-memory error of torch or Python."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or should_reduce_batch_size(error)


class HalvingBatches:
    """Processes clients or samples in batches of at most `size` (None = all in one batch), one after the other.

    If memory runs out, the same batch is processed again in halves, and later batches are at most as large as these.
    too_large(item): the error of an item that does not fit alone. forced: the size that memory forced, or None.
    """

    def __init__(self, items: Sequence[int], size: int | None, too_large: Callable[[int], str]) -> None:
        self._waiting = list(items)
        self._size = size or max(1, len(items))
        self._too_large = too_large
        self.forced: int | None = None

    def each(self, work: Callable[[list[int]], T]) -> Iterator[tuple[list[int], T]]:
        """(batch, what `work` returned for it). `work` must leave nothing behind where it fails.

        Raises RunError where an item does not fit alone.
        """
        while self._waiting:
            batch = self._waiting[: self._size]
            try:
                found = work(batch)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._halve(batch, error)
            else:
                del self._waiting[: len(batch)]
                yield batch, found
                del found  # before the next batch makes its own
                continue
            clear_device_cache(garbage_collection=True)  # here the error, and the frames it held, are gone

    def _halve(self, batch: list[int], error: Exception) -> None:
        if len(batch) == 1:
            message = (str(error) or type(error).__name__).splitlines()[0]
            raise RunError(f"{self._too_large(batch[0])} ({message})") from error
        self._size = self.forced = len(batch) // 2
