"""`fedllm list`: the runs below a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import make_run
from repository import REPO

from fedllm.cli import main
from fedllm.common.console import console
from fedllm.results.listing import list_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder / "first", seed=3)
    make_run(folder / "sweep" / "lr=0.1-s0", "federation.rounds=9", algorithm="scaffold", finished=False, torn=True)
    (make_run(folder / "sweep" / "damaged") / "result.json").write_text("{")
    (folder / "first" / "adapter").mkdir()
    (folder / "first" / "adapter" / "recipe.yaml").write_text("not a run: no run has runs inside")
    return folder


def test_each_run_has_its_state_and_best_score(runs: Path) -> None:
    os.utime(runs / "first" / "metrics.jsonl", (time.time() - 7_300, time.time() - 7_300))
    first, damaged, unfinished = list_runs([runs, runs / "sweep"])
    assert (first.folder, first.state, first.score, first.seed) == (runs / "first", "finished", "accuracy 0.9000", 3)
    assert (first.algorithm, first.data, first.ago) == ("fadamgc", "glue/sst2", "2 h ago")
    assert (unfinished.algorithm, unfinished.state, unfinished.score) == (
        "scaffold",
        "4 of 9 rounds",
        "accuracy 0.9000",
    )
    assert unfinished.ago.endswith(" s ago")
    assert damaged.state.startswith("result.json is not JSON")
    assert damaged.algorithm == damaged.score == ""


@pytest.mark.parametrize(("width", "shown"), [(200, ["algorithm", "data", "changed"]), (60, ["run", "state", "best"])])
def test_a_narrow_terminal_shows_fewer_columns(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, shown: list[str]
) -> None:
    monkeypatch.setattr(console, "_width", width)
    monkeypatch.setattr(type(console), "is_terminal", True)
    monkeypatch.chdir(runs.parent)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(name in lines[0] for name in shown)
    assert ("algorithm" in lines[0]) == (width == 200)
    assert max(map(len, lines)) <= width


def test_a_file_has_whole_names(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(runs)]) == 0
    assert f"{runs / 'sweep' / 'lr=0.1-s0'} " in capsys.readouterr().out


def test_programs_read_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(runs), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(each["folder"]).name for each in found] == ["first", "damaged", "lr=0.1-s0"]
    assert found[0]["state"] == "finished"


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere: no such folder"), ("empty", "empty: no run below it; a run folder has")]
)
def test_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["list", name]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_ends_is_no_error(runs: Path) -> None:
    command = f"'{sys.executable}' -m fedllm list --json {runs} | true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(["bash", "-c", command], cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout in ("0\n", "141\n")  # 0 where it had written all before the reader ended
