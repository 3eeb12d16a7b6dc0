"""Runs that train all weights of a ResNet with batch norm, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from launched import launch, numbers
from safetensors.torch import load_file
from tiny_images import write_parquet
from transformers import ResNetConfig, ResNetForImageClassification

from fedllm.cli.commands import main


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny ResNet on images of three classes."""
    folder = tmp_path_factory.mktemp("resnet")
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ResNetForImageClassification(config).save_pretrained(folder / "resnet")
    write_parquet(folder / "train.parquet", 64, seed=0)
    write_parquet(folder / "validation.parquet", 20, seed=1)
    sections = {
        "model": {"name": str(folder / "resnet")},
        "lora": None,
        "data": {
            "task": "image_classification",
            "train": str(folder / "train.parquet"), "validation": str(folder / "validation.parquet"),
        },
        "partition": {"clients": 4, "scheme": "iid"},
        "algorithm": {"name": "fedavg", "lr": 0.05},
        "federation": {"rounds": 2, "clients_per_round": 2},
        "local": {"steps": 4, "batch_size": 8},
        "run": {"threads": 1, "checkpoint_every": 1, "trackers": [], "precision": "float32"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return folder / "recipe.yaml"


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["average", "local", "group"])
def test_a_resnet_is_trained_resumed_shared_and_evaluated(recipe: Path, tmp_path: Path, norm: str) -> None:
    words = [str(recipe), f"model.norm={norm}"]
    assert main(["run", *words, "run.shares=2", f"run.dir={tmp_path / 'whole'}"]) == 0
    whole = model(tmp_path / "whole")
    assert any("running_mean" in name for name in whole) == (norm != "group")
    for rounds in (1, 2):
        more = [f"federation.rounds={rounds}", "run.shares=2", f"run.dir={tmp_path / 'parts'}"]
        assert main(["run", *words, *more]) == 0
    parts = model(tmp_path / "parts")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert main(["evaluate", str(tmp_path / "whole"), "--out", str(tmp_path / "scores.json")]) == 0
    final = json.loads((tmp_path / "whole" / "result.json").read_text())["final"]
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == pytest.approx(final, abs=1e-4)
    if norm != "group":
        done = launch("scripts/fedtune.py", *words, f"run.dir={tmp_path / 'two'}")
        assert done.returncode == 0, done.stderr
        two = model(tmp_path / "two")
        assert all(torch.equal(value, two[name]) for name, value in whole.items())
        assert numbers(tmp_path / "two") == numbers(tmp_path / "whole")


def test_the_plan_says_what_becomes_of_batch_norm(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "model.norm=local", "--dry-run"]) == 0
    assert "96 running statistics, each client goes on from its own" in " ".join(capsys.readouterr().out.split())
