"""The device, the threads and the precision of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fedllm.common.console import warn
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.distributed.process_group import find_device, local_size


@dataclass(frozen=True)
class Machine:
    """Where a run computes. threads: per process. autocast: dtype of the matrix products, None for float32."""

    device: torch.device
    threads: int
    autocast: torch.dtype | None
    processes: int = 1

    @property
    def precision(self) -> str:
        """The autocast dtype in words."""
        return "float32" if self.autocast is None else str(self.autocast).removeprefix("torch.")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones here: in hardware, not emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def find_machine(recipe: Recipe, processes: int = 1) -> Machine:
    """Chooses the device, threads and precision of a run, and sets this process's number of threads.

    accelerate and torchrun start each CPU process with one thread. So the number is set here: the machine's cores
    divided by its processes.
    """
    wanted = recipe.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device=cuda: this machine has no GPU that torch can use; set run.device=auto or cpu, or install "
            "a CUDA build of torch"
        )
    device = find_device(cpu=wanted == "cpu")
    local = local_size()
    if device.type == "cuda" and local > (gpus := torch.cuda.device_count()):
        warn(
            f"{local} processes share {gpus} GPU{'s' * (gpus > 1)} and divide the memory; one process a GPU, which "
            f"trains all of its clients together, is usually faster"
        )
    threads = recipe.run.threads or max(1, usable_cores() // local)
    torch.set_num_threads(threads)
    chosen = recipe.run.precision
    bfloat16 = chosen == "bfloat16" or (chosen == "auto" and fast_bfloat16(device))
    return Machine(device, threads, torch.bfloat16 if bfloat16 else None, processes)
