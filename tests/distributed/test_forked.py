"""Forks for tests: what a fork finds is what a new Python under torchrun finds, and real signals end it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import forked
import pytest
from launched import launch, torchrun
from repository import REPO

# Everything that a run reads of its process.
STATE = """
import json, os, random, signal, sys, threading
import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
import fedllm.experiment.run

MEET = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "LC_CTYPE", "COLUMNS", "LINES")
print(json.dumps({
    "environment": {name: value for name, value in sorted(os.environ.items()) if name not in MEET},
    "words": sys.argv, "path": sys.path, "name": __name__, "folder": os.getcwd(), "stdin": sys.stdin.read(),
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
    "drawn": [random.random(), float(np.random.rand()), torch.rand(1).item()],
    "torch": [torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
              torch.distributed.is_initialized(), str(torch.get_default_device())],
    "accelerate": [dict(AcceleratorState._shared_state), dict(PartialState._shared_state)],
    "handlers": {int(each): str(signal.getsignal(each)) for each in (2, 10, 15)},
    "buffers": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding],
}), flush=True)
"""


@pytest.mark.slow
def test_a_fork_finds_what_a_process_of_torchrun_finds(tmp_path: Path) -> None:
    script = tmp_path / "state.py"
    script.write_text(STATE)
    found = []
    for start in (launch, torchrun):
        done = start(str(script), "one", "two", processes=1)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    fork, process = found
    assert all(one != other for one, other in zip(fork.pop("drawn"), process.pop("drawn"), strict=True))
    assert {key: value for key, value in fork.items() if value != process[key]} == {}, process


@pytest.mark.slow
def test_forks_have_ranks_and_generators_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "state.py"
    script.write_text(STATE)
    done = launch(str(script), machines=[tmp_path, REPO])
    states = [json.loads(line) for line in done.stdout.splitlines()]
    first, second = sorted(states, key=lambda state: str(state["environment"]["RANK"]))
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))
    assert (first["folder"], second["folder"]) == (str(tmp_path), str(REPO))
    for rank, state in enumerate((first, second)):
        names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        assert [int(state["environment"][name]) for name in names] == [rank, rank, 0, 1, 2]


@pytest.mark.slow
def test_a_fork_ends_as_python_ends(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit, os, signal, sys\n"
        "atexit.register(print, 'left')\n"
        "match sys.argv[1]:\n"
        "    case 'raise': raise ValueError('found none')\n"
        "    case 'die': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    case word: sys.exit(int(word) if word.isdigit() else word)\n"
    )
    done = {word: forked.run(str(script), word, folder=tmp_path) for word in ("0", "3", "why", "raise", "die")}
    assert {word: each.returncode for word, each in done.items()} == {"0": 0, "3": 3, "why": 1, "raise": 1, "die": -9}
    assert {word: each.stdout for word, each in done.items()} == dict.fromkeys(done, "left\n") | {"die": ""}
    assert done["why"].stderr == "why\n"
    assert done["raise"].stderr.endswith("ValueError: found none\n")


@pytest.mark.slow
def test_after_a_failure_the_others_are_asked_to_end(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else None\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('asked to end'))\n"
        "time.sleep(60)\n"
    )
    done = launch(str(script))
    assert done.returncode == 1
    assert done.stderr == "asked to end\n"


def test_a_fork_is_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    out = tmp_path / "out.txt"
    process = forked.start(str(tmp_path / "waits.py"), out=out)
    while not out.exists() or not out.read_text():
        assert process.poll() is None
    assert int(out.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
