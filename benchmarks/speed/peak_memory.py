"""The most memory that work takes, beside what the process holds already: on a GPU, or of a Linux process."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Counts from the moment it is made. Ask `bytes` after the work."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        elif _RESET.exists():
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier side freed would not be counted again
            _RESET.write_text("5")  # sets the process's peak to what it holds now
            self._held = _resident("VmRSS")

    def bytes(self) -> int | None:
        """The peak so far, less what was held at the start; None where the system does not tell."""
        if self._cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self._held
        return _resident("VmHWM") - self._held if _RESET.exists() else None


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
