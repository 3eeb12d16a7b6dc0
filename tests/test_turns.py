"""One process a run folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fedllm.errors import UserError
from fedllm.turns import BusyError, alone, in_turn


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with alone(folder):
        with pytest.raises(BusyError, match="another process is at work on this run; wait for it"), alone(folder):
            pass
        assert folder.is_dir(), "still empty, but not the other one's to remove"
        with alone(tmp_path / "runs" / "two"):
            pass
    assert not (tmp_path / "runs").exists(), "made for nothing, and removed"
    with alone(folder):
        (folder / "recipe.yaml").touch()
    assert (folder / "recipe.yaml").exists()


def test_waiting_ends_when_the_other_one_does(tmp_path: Path) -> None:
    order: list[str] = []
    held, waiting = threading.Event(), threading.Event()

    def first() -> None:
        with alone(tmp_path):
            held.set()
            waiting.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    waiting.set()
    with alone(tmp_path, wait=True):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_who_waited_for_a_folder_that_was_removed_makes_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held = threading.Event()

    def first() -> None:
        with alone(folder):
            held.set()
            time.sleep(0.2)  # nothing comes into it

    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    with alone(folder, wait=True):
        (folder / "recipe.yaml").touch()
        with pytest.raises(BusyError), alone(folder):
            pass
    thread.join()
    assert (folder / "recipe.yaml").exists()


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.dir=.*cannot be made"), alone(tmp_path / "file" / "run"):
        pass


def test_what_another_one_has_comes_last(tmp_path: Path) -> None:
    done: list[tuple[str, bool]] = []

    def work(item: str, wait: bool) -> None:
        if item == "busy" and not wait:
            raise BusyError(tmp_path)
        done.append((item, wait))

    in_turn(["a", "busy", "b"], work)
    assert done == [("a", False), ("b", False), ("busy", True)]
