"""Commands under torchrun, with one thread per process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from repository import REPO

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def launch(
    *words: str, processes: int = 2, restarts: int = 0, fault: str = "", timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """A script and its arguments in several processes, which must end in time, also where others use the cores."""
    counts = ["--nproc_per_node", str(processes), "--max_restarts", str(restarts)]
    environment = {**ENVIRONMENT, "FEDLLM_TEST_FAULT": fault}
    command = [*TORCHRUN, "--master_port", str(free_port()), *counts, *words]
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=timeout)


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
