"""Runs that start from a trained classifier: its head is kept, and the run says and records it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from adapters import same_bits
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import UserError
from fedllm.experiment.resume import check_folder
from fedllm.experiment.run import RunResult, dry_run
from fedllm.results.reader import load_run

STILL = ["algorithm={name: fedavg, lr: 1.0e-12}", "federation.rounds=1", "run.checkpoint_every=1"]


@pytest.fixture(scope="module")
def first(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", [], tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def merged(first: RunResult) -> Path:
    """The adapter of a run, merged into its base by PEFT."""
    folder = first.folder.parent / "merged"
    AutoPeftModelForSequenceClassification.from_pretrained(first.folder / "adapter").merge_and_unload().save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(first.folder / "adapter").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_run_from_a_merged_adapter_begins_where_that_one_ended(
    tiny: Path, tmp_path: Path, first: RunResult, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STILL, f"model.name={merged}"]
    again = run_recipe(tiny / "recipe.yaml", words, tmp_path / "again")
    said = " ".join(capsys.readouterr().out.split())
    assert "head: kept from the checkpoint" in said
    assert again.result["final"]["eval_loss"] == pytest.approx(first.result["final"]["eval_loss"], rel=1e-4)
    new = run_recipe(tiny / "recipe.yaml", [*words, "model.head=new"], tmp_path / "new")
    assert new.result["final"]["eval_loss"] != pytest.approx(first.result["final"]["eval_loss"], rel=1e-2)
    heads = [load_run(folder).recipe["model"]["head"] for folder in (first.folder, again.folder, new.folder)]
    assert heads == ["new", "keep", "new"], "what was chosen, so that reports tell such runs apart"


def test_the_plan_says_where_the_head_comes_from(tiny: Path, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", [f"model.name={merged}"]))
    dry_run(load_recipe(tiny / "recipe.yaml"))
    said = " ".join(capsys.readouterr().out.split())
    assert "head kept from the checkpoint" in said
    assert "head new (the checkpoint has no classifier.bias)" in said


def without_head(folder: Path) -> None:
    """A run folder as a version without model.head left it."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    del recipe["model"]["head"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for manifest in (folder / "checkpoints").glob("*/manifest.json"):
        values = json.loads(manifest.read_text())
        del values["facts"]["head"]
        manifest.write_text(json.dumps(values))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_with_a_new_head(tiny: Path, tmp_path: Path, merged: Path) -> None:
    words = ["federation.rounds=2", f"model.name={merged}"]
    whole = run_recipe(tiny / "recipe.yaml", [*words, "model.head=new"], tmp_path / "whole")
    cut = shutil.copytree(whole.folder, tmp_path / "cut")
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "000002")
    without_head(cut)
    run_recipe(tiny / "recipe.yaml", words, cut)
    assert same_bits(whole.folder, cut)
    assert load_run(cut).recipe["model"]["head"] == "new"


def test_folders_are_compared_by_the_head(tiny: Path, first: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(first.folder, tmp_path / "run")
    check_folder(folder, load_recipe(tiny / "recipe.yaml", ["model.head=new"]))
    check_folder(folder, load_recipe(tiny / "recipe.yaml"))
    without_head(folder)
    check_folder(folder, load_recipe(tiny / "recipe.yaml"))
    with pytest.raises(UserError, match=r"model\.head: 'new' there, 'keep' here"):
        check_folder(folder, load_recipe(tiny / "recipe.yaml", ["model.head=keep"]))
