"""Scripts as forks of one process that has imported what they import. Run as a script, this file is that process.

The import of torch, transformers and peft takes most of the time of a short run. The process that is forked has only
imported: it has opened no group, trained nothing and started no thread of Python. A fork has its own pid, environment,
folder and files, runs its script as __main__, ends as Python ends, and dies of real signals. Two things of a new Python
that it has not: a hash seed of its own, and its own time of import.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repository import REPO

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
IMPORTED = (
    "fedllm.cli.commands", "fedllm.experiment.launch", "fedllm.experiment.run", "fedllm.experiment.serve",
    "fedllm.experiment.site", "fedllm.problems.full.problem", "fedllm.reporting.report", "fedllm.sweeps.sweep",
    "matplotlib.pyplot", "transformers.models.bert.modeling_bert",
)  # fmt: skip
_FILES = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Forked:
    """A fork that runs a script, with the methods of subprocess.Popen that the tests need."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.returncode: int | None = None
        self.pid = int(_imported().ask(order))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None before the end."""
        if self.returncode is None:
            self.returncode = _imported().ask({"ended": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 300.0) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code


def start(
    *words: str, out: Path, errors: Path | None = None, folder: Path = REPO, **environment: str
) -> Forked | subprocess.Popen[bytes]:
    """python WORDS, as a fork. out, errors: files to which stdout and stderr are added; both to `out` by default.

    environment: what it has besides ENVIRONMENT. On a machine with a GPU it is a new Python, since a fork of a process
    that has looked for GPUs cannot use them.
    """
    errors = errors or out
    if torch.cuda.is_available():
        with out.open("ab") as said, errors.open("ab") as complained:
            return subprocess.Popen(
                [sys.executable, *words], cwd=folder, env={**ENVIRONMENT, **environment},
                stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            )  # fmt: skip
    order = {"words": words, "out": str(out), "errors": str(errors), "folder": str(folder), "environment": environment}
    return Forked(order)


def run(*words: str, folder: Path, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """python WORDS to its end, as a fork. folder: where its output is written."""
    out, errors = folder / "stdout.txt", folder / "stderr.txt"
    for file in (out, errors):
        file.write_text("")
    process = start(*words, out=out, errors=errors)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, code, out.read_text(), errors.read_text())


class _Imported:
    """The process that is forked: one line of JSON asks, one answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], cwd=REPO, env=ENVIRONMENT, start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, order: dict[str, Any]) -> Any:
        asks, answers = self._process.stdin, self._process.stdout
        assert asks is not None
        assert answers is not None
        print(json.dumps(order), file=asks, flush=True)
        return json.loads(answers.readline())


@functools.cache
def _imported() -> _Imported:
    """One for all tests of this process. It ends, with its forks, when this process ends."""
    return _Imported()


def _import() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or the last collection of each fork would visit, and so copy, all that was imported


def _serve() -> dict[str, Any] | None:
    """Answers until stdin is closed. In a fork: returns what it was asked for."""
    running: set[int] = set()
    with open(0, closefd=False) as orders:
        for line in orders:
            order = json.loads(line)
            if "words" in order:
                if (answer := os.fork()) == 0:
                    return dict(order)
                running.add(answer)
            else:
                pid, status = os.waitpid(order["ended"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                running.discard(pid)
            os.write(1, json.dumps(answer).encode() + b"\n")
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _become(order: dict[str, Any]) -> None:
    """Runs a script in this process as a new Python does. What it raises ends the process."""
    os.setpgid(0, 0)
    # A shell starts a program in the background with SIGINT ignored, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = ((os.devnull, os.O_RDONLY), (order["out"], _FILES), (order["errors"], _FILES))
    for number, (path, flags) in enumerate(files):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    # Of its own, as in a new Python, in which an import seeds torch at random. The fork has seeded `random` already.
    np.random.seed()
    torch.seed()
    first, *rest = order["words"]
    if first == "-m":
        sys.path[0], sys.argv = order["folder"], rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).absolute().parent), [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _import()
    if (asked := _serve()) is not None:
        _become(asked)
