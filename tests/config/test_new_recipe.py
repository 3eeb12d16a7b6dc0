"""`fedllm new recipe` writes recipes that load, and a dry run takes them once they name a user's model and data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.cli import main
from fedllm.common.errors import UserError
from fedllm.config.new_recipe import TASKS, write_recipe


@pytest.mark.parametrize("task", TASKS)
def test_the_written_recipe_loads(task: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_recipe(path, task)
    recipe = load_recipe(path)
    assert recipe.data.task == task
    text = path.read_text()
    assert f"fedllm run {path} --dry-run" in text
    assert "runs/mine-s0" in text
    assert "FILE" not in text
    assert "STEM" not in text


@pytest.mark.slow
def test_a_dry_run_takes_it(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "recipe", "mine.yaml"]) == 0
    (tmp_path / "train.csv").write_bytes((tiny / "train.csv").read_bytes())
    words = [f"model.name={tiny / 'bert'}", "data.max_length=16", "partition.clients=4"]
    assert main(["run", "mine.yaml", "--dry-run", *words]) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("there.yaml", "there.yaml: is there already; choose another name"),
        ("mine.txt", "mine.txt: found the ending '.txt', expected .yaml"),
        ("nowhere/mine.yaml", "nowhere: no such folder; make it first"),
    ],
)
def test_what_is_there_stays(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    with pytest.raises(UserError) as caught:
        write_recipe(tmp_path / name, "classification")
    assert said in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["there.yaml"]
    assert (tmp_path / "there.yaml").read_text() == "mine"
