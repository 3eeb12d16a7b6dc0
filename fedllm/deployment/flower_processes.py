"""Starts Flower's processes, watches them, and starts again what died. Runs commands of `flwr`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedllm.common.errors import RunError, UserError
from fedllm.deployment.resident import private_folder

_TRIES = 5  # starts of one process within _WINDOW
_WINDOW = 600.0  # seconds
_LOOK = 0.5  # seconds between looks at a process
_COMMAND = 120.0  # seconds that a command of flwr may take
_TAIL = 2000  # bytes of a log that an error may quote
# Ends with its parent, also where that is killed. A program of its own: a fork of a process with threads may hang.
_BOUND = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def flower_folder() -> Path:
    """The folder of Flower's commands: FEDLLM_FLOWER, or beside this Python, or in the environment `flower` in it.

    flwr may need other versions of packages than fedllm is tried with, so that it may have an environment of its own.
    Raises UserError if there is none."""
    if given := os.environ.get("FEDLLM_FLOWER"):
        places = [Path(given).expanduser()]
    else:
        places = [Path(sys.executable).parent, Path(sys.prefix) / "flower" / "bin"]
    for place in places:
        if (place / "flower-superlink").is_file() and (place / "flower-supernode").is_file():
            return place
    raise UserError(
        f"Flower is not installed (looked in {', '.join(map(str, places))}); run: pip install 'fedllm[flower]', or "
        "name the folder of its commands in FEDLLM_FLOWER"
    )


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process: nothing is reported to others, and `home` is its party's own folder."""
    private_folder(home.parent)
    private_folder(home)
    commands = flower_folder()
    package = Path(__file__).resolve().parents[2]
    paths = [str(package)] if not (package / "certifi").exists() else []  # a source tree, not a site-packages
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "FEDLLM_"))},
        "PATH": os.pathsep.join([str(commands), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OMP_NUM_THREADS": "1",
    }


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().decode(errors="replace").strip()
    return ""


def bound(command: Sequence[str]) -> list[str]:
    """A command, with the path of its program, that ends with this process, however this process ends."""
    return [sys.executable, "-I", "-c", _BOUND, str(os.getpid()), *command]


class Child:
    """A process that is kept running: started again when it ended, at most _TRIES times in _WINDOW seconds.

    Its output goes to the file `log`. It ends when this process ends, however that happens. `failure` is why it could
    not be kept running. ready: called after a start that follows a death, such as to start what depends on it.
    final: reads the log of a dead process and returns an error that no new start would mend.
    """

    def __init__(
        self,
        command: Sequence[str],
        surroundings: Mapping[str, str],
        log: Path,
        *,
        final: Callable[[str], UserError | None] = lambda _: None,
        again: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.log = log.stem, log
        self._command, self._surroundings, self._final, self._again = [*command], {**surroundings}, final, again
        self._starts: list[float] = []
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.failure: UserError | RunError | None = None
        private_folder(log.parent)
        log.write_bytes(b"")
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process id; another one after a start anew."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive now."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts = [*(each for each in self._starts if time.monotonic() - each < _WINDOW), time.monotonic()]
        program = shutil.which(self._command[0], path=self._surroundings["PATH"])
        if program is None:
            raise UserError(f"{self._command[0]}: not found in {self._surroundings['PATH'].partition(os.pathsep)[0]}")
        words = bound([program, *self._command[1:]])
        with self.log.open("ab") as log:
            return subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._surroundings, start_new_session=True
            )

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK):
            if self.running:
                continue
            with self._lock:
                if self._ending.is_set():
                    return
                text = log_tail(self.log)
                if (failure := self._final(text)) is not None:
                    self.failure = failure
                    return
                if len(self._starts) >= _TRIES:
                    last = text.splitlines()[-1] if text else "it wrote nothing"
                    self.failure = RunError(
                        f"{self.name} ended {len(self._starts)} times and is not started again; its log is {self.log} "
                        f"and ends with: {last}"
                    )
                    return
                self._process = self._start()
            try:
                self._again()
            except (UserError, RunError) as error:
                self.failure = error
                return

    def end(self, seconds: float = 10.0) -> None:
        """Ends the process and all that it started."""
        self._ending.set()
        with self._lock:
            _end_group(self._process, seconds)
        self._thread.join(5)


def _end_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends a process and its children, which share its group: asks first, then kills."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def command(arguments: Sequence[str], home: Path) -> None:
    """Runs a command of Flower that prints JSON. Raises RunError with its reason if it fails."""
    surroundings = environment(home)
    program = flower_folder() / arguments[0]
    try:
        done = subprocess.run(
            [str(program), *arguments[1:]],
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=_COMMAND,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(arguments[:3])}: no answer within {_COMMAND:.0f} s") from None
    start = done.stdout.find("{")
    try:
        found = json.loads(done.stdout[start:]) if start >= 0 else {}
    except ValueError:
        found = {}
    if done.returncode or found.get("success") is False:
        why = str(found.get("error-message") or done.stderr or done.stdout).strip()
        raise RunError(f"{' '.join(arguments[:3])}: {why[-_TAIL:]}")


def free_port() -> int:
    """A port of this machine that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for_port(port: int, seconds: float, check: Callable[[], None]) -> None:
    """Waits until something listens at 127.0.0.1:port. Raises RunError after `seconds`, and what `check` raises."""
    end = time.monotonic() + seconds
    while True:
        check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > end:
            raise RunError(f"nothing listens at port {port} after {seconds:.0f} s")
        time.sleep(0.2)
