"""Runs that signals or run.max_hours end early: after a round, with a checkpoint, and the same bits later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapters import same_bits
from launched import launch
from repository import REPO

from fedllm import run_recipe
from fedllm.cli.commands import main
from fedllm.common.errors import Interrupted
from fedllm.experiment import training
from fedllm.experiment.build import ReadCache
from fedllm.experiment.stopping import StopRequests, stop_requests
from fedllm.federation.executor import Executor
from fedllm.sweeps.sweep import sweep

OVERRIDES = ["run.threads=1", "run.checkpoint_every=10", "run.trackers=[]"]


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_recipe(tiny / "recipe.yaml", OVERRIDES, tmp_path_factory.mktemp("whole") / "run").folder


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The signals as in a terminal: what starts the tests may ignore some, as nohup and a shell's & do."""
    ours = {signal.SIGINT: signal.default_int_handler}
    ours |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_round(monkeypatch: pytest.MonkeyPatch, round: int, act: Callable[[], None]) -> None:
    """Lets `act` be called in the middle of a round."""
    real = training.run_round

    def run_round(setup, state, clients, tracked, plan):  # type: ignore[no-untyped-def]
        if state.round + 1 == round:
            act()
        return real(setup, state, clients, tracked, plan)

    monkeypatch.setattr(training, "run_round", run_round)


def rounds_done(folder: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.slow
def test_a_signal_ends_the_round_with_a_checkpoint_and_the_run_goes_on_to_the_same_bits(
    tiny: Path, tmp_path: Path, whole: Path, name: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    number, folder = getattr(signal, name), tmp_path / "run"
    command = ["run", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        in_round(patch, 2, lambda: os.kill(os.getpid(), number))
        assert main(command) == 128 + number
    said = capfd.readouterr().err
    assert f"{name}: stopping after this round" in said
    assert said.endswith(f"fedllm: {folder}: stopped after round 2; the same command goes on ({name})\n")
    assert rounds_done(folder) == [1, 2]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000002"]
    assert signal.getsignal(number) is before
    assert main(command) == 0
    assert "going on after round 2 of 4" in capfd.readouterr().out
    assert same_bits(folder, whole)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(
    tiny: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["run", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES, "run.checkpoint_every=1"]

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        in_round(patch, 3, twice)
        assert main(command) == 130
    assert capfd.readouterr().err.endswith("fedllm: interrupted; the same command goes on where it was\n")
    assert rounds_done(folder) == [1, 2]
    assert main(command) == 0
    assert same_bits(folder, whole)


def test_a_signal_before_the_first_round_ends_at_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the data are read; nothing is left behind."""
    folder = tmp_path / "run"
    command = ["run", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    real = ReadCache.get

    def get(self, kind, *arguments):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, kind, *arguments)

    monkeypatch.setattr(ReadCache, "get", get)
    assert main(command) == 143
    assert capfd.readouterr().err == "fedllm: stopped; the same command goes on (SIGTERM)\n"
    assert not folder.exists()


def test_a_signal_in_the_last_round_lets_the_run_finish(
    tiny: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_round(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_recipe(tiny / "recipe.yaml", OVERRIDES, tmp_path / "run").result["rounds"] == 4
    assert same_bits(tmp_path / "run", whole)


@pytest.mark.slow
def test_max_hours_ends_after_a_round_with_its_own_exit_code(
    tiny: Path, tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["run", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    for done in (1, 2):
        assert main([*command, "run.max_hours=1e-9"]) == 75
        last = f"stopped after round {done}; the same command goes on (run.max_hours=1e-09 is over)\n"
        assert capfd.readouterr().err.endswith(last)
    assert main(command) == 0, "run.max_hours may change"
    assert same_bits(folder, whole)
    assert main([*command, "run.max_hours=0"]) == 2


@pytest.mark.slow
def test_a_sweep_ends_with_the_run_that_is_ended(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last round of the first cell: that cell is finished, the second is not begun."""
    (tmp_path / "grid.yaml").write_text("grid: {algorithm.lr: [0.01, 0.02]}")
    words = (tiny / "recipe.yaml", tmp_path / "grid.yaml", tmp_path / "out", [*OVERRIDES, "federation.rounds=2"])
    with monkeypatch.context() as patch:
        in_round(patch, 2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(Interrupted, match=r"stopped before .*lr=0.02-s0; the same command goes on \(SIGUSR1\)"):
            sweep(*words)
    assert (tmp_path / "out" / "lr=0.01-s0" / "result.json").is_file()
    assert not (tmp_path / "out" / "lr=0.02-s0").exists()
    with monkeypatch.context() as patch:
        in_round(patch, 1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(Interrupted, match=r"lr=0.02-s0: stopped after round 1; the same command"):
            sweep(*words)
    sweep(*words)
    assert (tmp_path / "out" / "lr=0.02-s0" / "result.json").is_file()


def test_what_is_ignored_stays_ignored_but_sigusr1() -> None:
    """SIGHUP is ignored under nohup."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        with stop_requests(1) as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR1) == stop.handle
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_lost_lease_ends_at_once_in_the_middle_of_a_round() -> None:
    with stop_requests(1) as stop, stop.in_rounds():
        lost = threading.Timer(0.05, stop.end_at_once)
        lost.start()
        with pytest.raises(KeyboardInterrupt):
            lost.join()


def test_under_torchrun_the_exit_code_is_0_and_a_copy_of_ctrl_c_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    stop = StopRequests(1)
    with stop.in_rounds():
        stop.handle(signal.SIGINT, None)
        stop.handle(signal.SIGINT, None)
        with pytest.raises(Interrupted) as error:
            stop.check(Executor(), None, "here")
        assert error.value.exit_code == 0
        monkeypatch.setattr("fedllm.experiment.stopping._COPY_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            stop.handle(signal.SIGINT, None)


@pytest.mark.slow
def test_two_processes_end_together_whichever_of_them_gets_the_signal(tiny: Path, tmp_path: Path) -> None:
    """SIGUSR1 to both in round 2, then to the second one alone in round 4; one process finishes with its own bits."""
    folder = tmp_path / "two"
    more = ["run.threads=1", "run.shares=2", "run.checkpoint_every=10", "federation.rounds=5"]
    for ranks, round in (("01", 2), ("1", 4)):
        words = ["tests/support/signalled.py", str(tiny / "recipe.yaml"), f"run.dir={folder}", *more]
        done = launch(*words, fault=f"{ranks}:{round}")
        assert done.returncode == 0, done.stderr
        assert f"fedllm: {folder}: stopped after round {round}; the same command goes on (SIGUSR1)" in done.stderr
        assert rounds_done(folder) == list(range(1, round + 1))
    run_recipe(tiny / "recipe.yaml", more, folder)
    assert same_bits(folder, run_recipe(tiny / "recipe.yaml", more, tmp_path / "one").folder)


def test_ctrl_c_while_libraries_are_imported_is_one_line(tiny: Path, tmp_path: Path) -> None:
    """numpy would make a thousand lines of it."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy.linalg':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Find())\n"
        "from fedllm.cli.commands import main\n"
        f"sys.exit(main(['run', {str(tiny / 'recipe.yaml')!r}, {f'run.dir={tmp_path}/run'!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\nfedllm: interrupted\n")
