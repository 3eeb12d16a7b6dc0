"""benchmarks/gpu/measure.py without a GPU: its recipes are valid, its commands exist, its parts report how they end."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import measure as gpu
from fedllm.cli.commands import main


@pytest.mark.parametrize("base", list(gpu.BASES))
@pytest.mark.slow
def test_a_made_recipe_is_good(tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = gpu.write_recipe(tmp_path, base, small=True)
    assert main(["run", str(recipe), "--dry-run", "run.device=cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2,000 training, 200 validation samples" in said
    assert "several samples per row" in said


def test_made_texts_are_as_long_as_sst2s(tmp_path: Path) -> None:
    gpu.write_texts(tmp_path / "t.csv", 4000, seed=0)
    lengths = [len(line.split()) for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    assert 12 < sum(lengths) / len(lengths) < 14
    assert (min(lengths), max(lengths)) == (2, 66)


@pytest.mark.parametrize("small", [False, True])
def test_every_part_has_a_name_of_its_own_and_runs_a_module_that_exists(small: bool) -> None:
    parts = gpu.parts({base: Path(f"{base}.yaml") for base in gpu.BASES}, ["run.device=cpu"], small)
    assert len({part.name for part in parts}) == len(parts) == 14
    for part in parts:
        module = part.command[part.command.index("-m") + 1]
        assert importlib.util.find_spec(module)
        assert all(Path(word).is_file() for word in part.command if word.endswith(".py"))


@pytest.mark.parametrize(
    ("code", "left", "status", "found"),
    [
        ("open('f.json', 'w').write('[1]')", 60, "done", [1]),
        ("raise SystemExit(3)", 60, "exit code 3", None),
        ("raise SystemExit(3)", 5, "no time left", None),
    ],
)
def test_what_becomes_of_a_part(tmp_path: Path, code: str, left: float, status: str, found: list[int] | None) -> None:
    with (tmp_path / "log.txt").open("w") as log:
        part = gpu.Part("one", [sys.executable, "-c", code], 60, "f.json")
        result = gpu.attempt(part, tmp_path, left, log.fileno())
    assert (result["status"], result.get("found")) == (status, found)
    assert (os.path.getsize(tmp_path / "log.txt") > 0) == (status != "no time left")
