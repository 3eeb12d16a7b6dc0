"""One process per run folder, with the kernel's locks and without them."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest

from fedllm.common.errors import UserError
from fedllm.experiment import run_lock as locks
from fedllm.experiment.run_lock import RunInUseError, run_each_when_free, run_lock


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        with (
            pytest.raises(RunInUseError, match="another process is at work on this run; wait for it"),
            run_lock(folder),
        ):
            pass
        assert folder.is_dir(), "still empty, but not the other one's to remove"
        with run_lock(tmp_path / "runs" / "two"):
            pass
    assert not (tmp_path / "runs").exists(), "made for nothing, and removed"
    with run_lock(folder):
        (folder / "recipe.yaml").touch()
    assert (folder / "recipe.yaml").exists()


def test_waiting_ends_when_the_other_one_does(tmp_path: Path) -> None:
    order: list[str] = []
    held, waiting = threading.Event(), threading.Event()

    def first() -> None:
        with run_lock(tmp_path):
            held.set()
            waiting.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    waiting.set()
    with run_lock(tmp_path, wait=True):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_who_waited_for_a_folder_that_was_removed_makes_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held = threading.Event()

    def first() -> None:
        with run_lock(folder):
            held.set()
            time.sleep(0.2)  # nothing comes into it

    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    with run_lock(folder, wait=True):
        (folder / "recipe.yaml").touch()
        with pytest.raises(RunInUseError), run_lock(folder):
            pass
    thread.join()
    assert (folder / "recipe.yaml").exists()


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.dir=.*cannot be made"), run_lock(tmp_path / "file" / "run"):
        pass


def test_what_another_one_has_comes_last(tmp_path: Path) -> None:
    done: list[tuple[str, bool]] = []

    def work(item: str, wait: bool) -> None:
        if item == "busy" and not wait:
            raise RunInUseError(tmp_path)
        done.append((item, wait))

    run_each_when_free(["a", "busy", "b"], work)
    assert done == [("a", False), ("b", False), ("busy", True)]


@pytest.mark.slow
def test_a_killed_process_releases_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from fedllm.experiment.run_lock import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunInUseError), run_lock(tmp_path):
            pass
        other.kill()
    with run_lock(tmp_path):
        pass


# File systems without flock


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(locks, "LEASE_SECONDS", 1.0)


@pytest.mark.usefixtures("no_flock")
@pytest.mark.slow
def test_without_flock_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with run_lock(folder):
        for _ in range(2):  # the first one takes longer than a lease lasts without a refresh
            time.sleep(0.6)
            with pytest.raises(RunInUseError), run_lock(folder):
                pass
        assert [path.name for path in folder.iterdir()] == [locks.LEASE]
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.slow
def test_without_flock_a_lease_that_nobody_refreshes_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, wait: bool
) -> None:
    """exchange: whether the file system can exchange two names, as filelock needs to take a lease over; NFS cannot."""
    program = (
        "import os, socket, sys; from filelock import SoftFileLease; socket.gethostname = lambda: 'elsewhere'\n"
        "lease = SoftFileLease(sys.argv[1], lease_duration=1.0); lease.acquire(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / locks.LEASE)], check=True)
    if not exchange:
        monkeypatch.setattr(filelock._util, "_rename_call", lambda: None)
    began = time.monotonic()
    with run_lock(tmp_path, wait=wait):
        assert time.monotonic() - began >= 1
        with pytest.raises(RunInUseError), run_lock(tmp_path):
            pass


@pytest.mark.usefixtures("no_flock")
def test_a_process_that_lost_its_lease_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()
    monkeypatch.setattr(locks, "interrupt_main", interrupted.set)
    with run_lock(tmp_path):
        (tmp_path / locks.LEASE).unlink()
        assert interrupted.wait(10)
