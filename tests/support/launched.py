"""Scripts in several processes, with one thread per process: under torchrun, or as forks that have torchrun's words."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import forked
from forked import ENVIRONMENT
from repository import REPO
from torch.distributed import TCPStore

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as in torchrun


def torchrun(
    *words: str, processes: int = 2, restarts: int = 0, fault: str = "", timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """A script and its arguments under torchrun, which must end in time, also where others use the cores."""
    counts = ["--nproc_per_node", str(processes), "--max_restarts", str(restarts)]
    environment = {**ENVIRONMENT, "FEDLLM_TEST_FAULT": fault}
    command = [*TORCHRUN, "--master_port", str(free_port()), *counts, *words]
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=timeout)


def launch(
    *words: str, processes: int = 2, machines: Sequence[Path] = (), fault: str = "", timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """A script and its arguments in forks (see forked.py), for tests whose subject is not torchrun itself.

    As torchrun does, this process keeps the store in which they meet, and ends the others by SIGTERM after one has
    failed. machines: the folders of machines that have one process each, instead of `processes` on one machine.
    """
    count = len(machines) or processes
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "stdout.txt", Path(folder) / "stderr.txt"
        for file in (out, errors):
            file.touch()
        ranks = [
            forked.start(
                *words, out=out, errors=errors, folder=machines[rank] if machines else REPO, FEDLLM_TEST_FAULT=fault,
                **_surroundings(rank, count, 1 if machines else count, store.port),
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            failed = _wait_for_all(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
        return subprocess.CompletedProcess(words, int(failed), out.read_text(), errors.read_text())


def _surroundings(rank: int, count: int, local: int, port: int) -> dict[str, str]:
    """What torchrun puts into the environment of a process. local: processes per machine."""
    machine, machines = rank // local, count // local
    numbers = {
        "RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": machine, "ROLE_RANK": rank, "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": machines, "ROLE_WORLD_SIZE": count, "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }  # fmt: skip
    words = {
        "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return words | {name: str(number) for name, number in numbers.items()}


def _wait_for_all(ranks: list[forked.Forked | subprocess.Popen[bytes]], end: float) -> bool:
    """Whether a process failed. Raises subprocess.TimeoutExpired."""
    asked = False
    while None in (codes := [process.poll() for process in ranks]):
        if any(codes) and not asked:
            asked, end = True, min(end, time.monotonic() + _GRACE)
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        if time.monotonic() > end:
            if asked:
                return True
            raise subprocess.TimeoutExpired("the processes", 0.0)
        time.sleep(0.05)
    return any(codes)


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def numbers(folder: Path) -> list[dict[str, object]]:
    """The lines of a run's metrics.jsonl without its times."""
    timed = {"seconds", "simulated_seconds", "eval_seconds"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]
