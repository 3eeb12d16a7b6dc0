"""A recipe that is not there: which file may be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.common.errors import UserError

SMALL = "data: {name: glue/sst2}\nalgorithm: {name: fadamgc}\n"


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_missing_recipe_names_the_file_that_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "sub").mkdir()
    write(tmp_path / "recipes", SMALL, "quick.yaml")
    for folder, given, meant in (
        (tmp_path, "quick", "recipes/quick.yaml"),
        (tmp_path, "quick.yaml", "recipes/quick.yaml"),
        (tmp_path / "sub", "recipes/quick.yaml", "../recipes/quick.yaml"),
        (tmp_path / "sub", "quick.yaml", "../recipes/quick.yaml"),
    ):
        monkeypatch.chdir(folder)
        with pytest.raises(UserError) as error:
            load_recipe(given)
        assert str(error.value) == f"{given}: no such recipe file; did you mean {meant}?"
    with pytest.raises(UserError, match=r"recipes: is a folder, expected a recipe file$"):
        load_recipe(tmp_path / "recipes")
