"""The profile of a run: every second of a round is charged once, and no number of the run is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedllm import run_recipe
from fedllm.cli.commands import main
from fedllm.common.profiling import SECTIONS, Profile, end_round, running, section

CPU = torch.device("cpu")


class Watch:
    """A clock that the test turns by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("fedllm.common.profiling.time.perf_counter", lambda: self.now)

    def work(self, name: str, seconds: float) -> None:
        with section(name):
            self.now += seconds

    def fail(self, name: str, seconds: float) -> None:
        with section(name):
            self.now += seconds
            raise ValueError("full")


def test_each_second_is_charged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    profile = Profile(tmp_path / "profile.json", CPU)
    watch.now += 100.0  # before the rounds begin
    with running(profile):
        watch.work("forward", 3.0)
        watch.now += 1.0
        watch.work("backward", 4.0)
        with section("evaluate"):
            watch.work("forward", 8.0)
            watch.now += 4.0
        end_round(1)
        watch.work("forward", 2.0)
        end_round(2)
    assert [line["seconds"] for line in profile.rounds] == [20.0, 2.0]
    assert [line["forward"] for line in profile.rounds] == [3.0, 2.0]
    assert profile.mean() == dict.fromkeys(SECTIONS, 0.0) | {
        "forward": 2.5,
        "backward": 2.0,
        "evaluate": 6.0,
        "other": 0.5,
    }
    training = profile.percent(without=("evaluate",))
    assert (training["forward"], training["backward"], training["other"]) == (50.0, 40.0, 10.0)
    assert "evaluate" not in training
    assert json.loads((tmp_path / "profile.json").read_text())["rounds"] == profile.rounds


def test_nothing_is_charged_without_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    profile = Profile(tmp_path / "profile.json", CPU)
    with running(None):
        watch.work("forward", 3.0)
        end_round(1)
    with running(profile):
        pass
    watch.work("forward", 3.0)
    end_round(1)
    assert profile.rounds == []
    assert section("forward") is section("reduce")  # the one null context


def test_a_section_that_fails_leaves_the_next_ones_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    profile = Profile(tmp_path / "profile.json", CPU)
    with running(profile):
        with pytest.raises(ValueError, match="full"):
            watch.fail("checkpoint", 1.0)
        watch.work("reduce", 2.0)
        end_round(1)
    assert (profile.rounds[0]["checkpoint"], profile.rounds[0]["reduce"]) == (1.0, 2.0)


def test_on_a_gpu_a_section_ends_when_its_work_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    queued = 0.0

    def synchronize(device: torch.device) -> None:
        nonlocal queued
        watch.now, queued = watch.now + queued, 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    profile = Profile(tmp_path / "profile.json", torch.device("cuda:0"))
    with running(profile):
        queued = 1.0  # of `other`
        with section("forward"):
            queued = 2.0
        with section("backward"):
            queued = 5.0
        end_round(1)
    (line,) = profile.rounds
    assert (line["forward"], line["backward"], line["other"]) == (2.0, 5.0, 1.0)


@pytest.mark.slow
def test_a_profiled_run_gives_the_same_bits(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And after an interruption it goes on with the profile of the rounds that stand."""
    plain = run_recipe(tiny / "recipe.yaml", ["eval.every=2"], tmp_path / "plain")
    words = [str(tiny / "recipe.yaml"), "eval.every=2", f"run.dir={tmp_path / 'profiled'}", "--profile"]
    assert main(["run", *words]) == 0
    folder = tmp_path / "profiled"
    assert not (plain.folder / "profile.json").exists()
    _same(plain.folder, folder)
    printed = capsys.readouterr().out
    assert "where the time of 4 rounds went, cpu" in printed
    assert all(name in printed for name in SECTIONS if name != "wait")
    whole = json.loads((folder / "profile.json").read_text())
    for line in whole["rounds"]:
        assert sum(line[name] for name in SECTIONS) == pytest.approx(line["seconds"], abs=1e-5)
        assert min(line[name] for name in (*SECTIONS, "seconds")) >= 0.0
        assert all(line[name] > 0.0 for name in ("data", "forward", "backward", "optimizer", "reduce", "checkpoint"))
        assert (line["evaluate"] > 0.0) == (line["round"] % 2 == 0)
        assert line["wait"] == 0.0
    assert sum(whole["percent"].values()) == pytest.approx(100.0, abs=1e-4)
    assert set(SECTIONS) - set(whole["percent_of_training"]) == {"evaluate", "checkpoint"}

    (folder / "result.json").unlink()
    for round in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"{round:06d}", ignore_errors=True)
    shutil.copytree(plain.folder / "checkpoints" / "000003", folder / "checkpoints" / "000003")
    assert main(["run", *words]) == 0
    again = json.loads((folder / "profile.json").read_text())["rounds"]
    assert [line["round"] for line in again] == [1, 2, 3, 4]
    assert again[:3] == whole["rounds"][:3]
    assert again[3] != whole["rounds"][3]
    _same(plain.folder, folder)


def _same(a: Path, b: Path) -> None:
    first, second = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [[line["train_loss"] for line in _lines(folder)] for folder in (a, b)]
    assert losses[0] == losses[1]


def _lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
