"""Runs that an earlier version began, whose recipe.yaml says run.cohort, go on as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from adapters import same_bits

from fedllm import run_recipe
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment.resume import check_folder
from fedllm.results.reader import load_run


def as_earlier(folder: Path) -> None:
    """The recipe.yaml of a run as a version before run.stacked_clients wrote it."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["run"]["cohort"] = recipe["run"].pop("stacked_clients")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


@pytest.mark.slow
def test_an_earlier_run_goes_on_with_its_own_choice(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["federation.rounds=2", "run.threads=1", "run.cohort=2"]
    whole = run_recipe(tiny / "recipe.yaml", words, tmp_path / "whole")
    cut = shutil.copytree(whole.folder, tmp_path / "cut")
    as_earlier(cut)
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "000002")
    capsys.readouterr()
    again = run_recipe(tiny / "recipe.yaml", [*words[:2], "run.stacked_clients=3"], cut)
    said = capsys.readouterr().out
    assert "run.stacked_clients=3 is for a new run; this one goes on with 2" in said
    assert "going on after round 1 of 2" in said
    assert again.result["machine"]["stacked_clients"] == again.result["machine"]["cohort"] == 2
    assert same_bits(whole.folder, cut)
    assert "cohort" not in yaml.safe_load((cut / "recipe.yaml").read_text())["run"]


def test_another_name_of_the_algorithm_is_the_same_run(tiny: Path, tmp_path: Path) -> None:
    words = ["federation.rounds=1", "run.threads=1"]
    folder = run_recipe(tiny / "recipe.yaml", [*words, "algorithm.name=FAdamGT"], tmp_path / "run").folder
    for name in ("recipe.yaml", "result.json"):
        text = (folder / name).read_text()
        assert "fadamgc" in text
        (folder / name).write_text(text.replace("fadamgc", "fadamgt"))
    assert run_recipe(tiny / "recipe.yaml", words, folder).metrics
    assert (load_run(folder).algorithm, load_run(folder).result["algorithm"]) == ("fadamgc", "fadamgc")


def test_a_folder_of_an_earlier_version_is_compared_by_the_keys_of_this_one(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text(recipe.yaml())
    as_earlier(tmp_path)
    check_folder(tmp_path, recipe)
    other = load_recipe(tiny / "recipe.yaml", ["local.batch_size=3"])
    with pytest.raises(UserError, match="holds the run of another recipe") as error:
        check_folder(tmp_path, other)
    assert str(error.value).splitlines()[1:] == ["  local.batch_size: 8 there, 3 here"]


def test_a_title_may_be_given_later(tiny: Path, tmp_path: Path) -> None:
    """Also to a run whose version had no data.title."""
    recipe = yaml.safe_load(load_recipe(tiny / "recipe.yaml").yaml())
    del recipe["data"]["title"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    check_folder(tmp_path, load_recipe(tiny / "recipe.yaml", ["data.title=AG News"]))
