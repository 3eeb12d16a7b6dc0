"""The processes that torchrun, accelerate launch or srun started: their ranks, and the process group between them.

Accelerate gives each process its device. The process group is NCCL between GPUs, and gloo between CPUs and where
processes share a GPU. Plain data and clients' vectors go through gloo in every case.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedllm.common.errors import RunError


class StoppedError(RunError):
    """This process has to end, and with it the whole run: another process is lost."""


class TerminatedError(StoppedError):
    """This process was asked to end, by SIGTERM; launchers also ask so when another process is lost."""


def rank() -> int:
    """This process's number among those started together; 0 where there is one."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size() -> int:
    """How many of them were started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def restarted() -> bool:
    """Whether torchrun started the processes again after one of them was lost (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def under_torchrun() -> bool:
    """Whether torchrun started this process, which starts all processes again if one ends with an exit code above 0.
    `accelerate launch` uses torchrun for several processes."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def find_device(*, cpu: bool) -> torch.device:
    """The device that Accelerate gives this process. cpu: the CPU, also where there is a GPU."""
    device: torch.device = Accelerator(cpu=cpu or not torch.cuda.is_available()).device
    return device


def open_group(*, cpu: bool, timeout: float) -> None:
    """Opens the process group, if it is not open yet.

    cpu: see find_device. timeout: seconds that one process waits for another. The launcher's signals are for rank 0,
    which tells who failed; the other processes end when rank 0 is gone.
    """
    if torch.distributed.is_initialized():
        return
    cpu = cpu or not torch.cuda.is_available()
    shared = not cpu and local_size() > torch.cuda.device_count()
    backend = "gloo" if cpu or shared else "cuda:nccl,cpu:gloo"
    # torchrun's static rendezvous keeps one store over all restarts: without a prefix of its own, a restarted group
    # would find the addresses of the processes before it.
    attempt, wait = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), timedelta(seconds=timeout)
    store, number, count = next(iter(rendezvous("env://", timeout=wait)))
    store = PrefixStore(f"fedllm/{attempt}", store)
    torch.distributed.init_process_group(backend, store=store, rank=number, world_size=count, timeout=wait)
    Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=wait)])
    atexit.register(_close_group)
    if threading.current_thread() is not threading.main_thread():
        return
    if rank():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, _stop)


def ignore_stop() -> None:
    """From now on SIGTERM is ignored: this process ends by itself, and must have the time to say why."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def abandon_group() -> None:
    """Another process is lost: the group cannot be closed in order any more. It ends with this process."""
    ignore_stop()
    atexit.unregister(_close_group)


def _close_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _stop(*_: object) -> None:
    raise TerminatedError("stopped (SIGTERM)")
