"""A data file that is missing is an error that says where it was looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.common.errors import UserError
from fedllm.config.own_files import require_own_files


def test_a_file_of_data_that_is_beside_the_recipe_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(tiny / "recipe.yaml", ["data.train=train.csv"])
    with pytest.raises(UserError) as error:
        require_own_files(recipe)
    assert str(error.value) == (
        f"data.train=train.csv: no such file or folder in {tmp_path}, the current folder, from which paths are read; "
        f"it is beside the recipe: write data.train={tiny}/train.csv"
    )
    with pytest.raises(UserError, match=r"data\.validation=no\.csv: no such file .*paths are read$"):
        require_own_files(load_recipe(tiny / "recipe.yaml", ["data.validation=no.csv"]))
    monkeypatch.chdir(tiny)
    require_own_files(recipe)
