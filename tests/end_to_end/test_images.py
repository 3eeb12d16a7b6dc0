"""Runs on images from the command line: adapters and all weights, resumed, evaluated, and mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from launched import launch, numbers
from PIL import Image
from safetensors.torch import load_file
from tiny_images import SIDE, coloured, save_model, write_folders, write_parquet

from fedllm.cli.commands import main


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny ViT, images of three classes, and a recipe over them."""
    folder = tmp_path_factory.mktemp("images")
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.25]}
    save_model(folder / "vit", "vit", processor, hidden_dropout_prob=0.1)
    write_parquet(folder / "train.parquet", 96, seed=0)
    write_parquet(folder / "validation.parquet", 30, seed=1)
    recipe = {
        "model": {"name": str(folder / "vit")},
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.1},
        "data": {
            "task": "image_classification", "augment": "standard",
            "train": str(folder / "train.parquet"), "validation": str(folder / "validation.parquet"),
        },
        "partition": {"clients": 6, "alpha": 0.5, "min_size": 3},
        "algorithm": {"name": "fadamgc", "lr": 0.01},
        "federation": {"rounds": 3, "clients_per_round": 3},
        "local": {"steps": 2, "batch_size": 8},
        "eval": {"every": 3},
        "run": {"threads": 1, "checkpoint_every": 1, "trackers": []},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def run(images: Path, out: Path, *overrides: str) -> int:
    return main(["run", str(images / "recipe.yaml"), f"run.dir={out}", *overrides])


def trained(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [*folder.glob("*/adapter_model.safetensors"), *folder.glob("model/model.safetensors")]
    return load_file(file)


TEXTS = ("data={{task: classification, train: {texts}}}", "data.augment=none", "data.validation=null")
ALL_WEIGHTS = ("lora=null", "model.name=cnn", "algorithm.lr=0.003")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ALL_WEIGHTS], ids=["adapters", "all weights"])
def test_a_run_learns_and_is_resumed_to_the_same_bits(images: Path, tmp_path: Path, overrides: Sequence[str]) -> None:
    assert run(images, tmp_path / "whole", *overrides) == 0
    assert run(images, tmp_path / "parts", *overrides, "federation.rounds=2") == 0
    assert run(images, tmp_path / "parts", *overrides) == 0
    whole, parts = trained(tmp_path / "whole"), trained(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole.keys() | parts.keys())
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["primary"] == "accuracy"
    assert result["final"]["accuracy"] > 0.6
    written = yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())
    assert written["data"]["image_size"] == SIDE


@pytest.mark.slow
def test_the_card_of_an_adapter_gives_the_runs_answers(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(images, tmp_path / "run", "federation.rounds=4", "run.precision=float32") == 0
    assert main(["evaluate", str(tmp_path / "run"), "--out", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert scores == pytest.approx(json.loads((tmp_path / "run" / "result.json").read_text())["final"], abs=1e-4)
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path / "run" / "adapter")
    pixels, labels = coloured(30, seed=1)
    right = 0
    for image, label in list(zip(pixels, labels, strict=True))[:6]:
        Image.fromarray(image.transpose(1, 2, 0)).save("an_image.png")
        capsys.readouterr()
        exec(code, {})
        right += capsys.readouterr().out.split()[-1] == ["blue", "green", "red"][label]
    assert right >= 6 * scores["accuracy"] - 1.5


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ALL_WEIGHTS], ids=["adapters", "all weights"])
def test_two_processes_give_the_bits_of_one(images: Path, tmp_path: Path, overrides: Sequence[str]) -> None:
    """With dropout and augmentation, of three clients a round."""
    words = (*overrides, "federation.rounds=2", "eval.every=1", "run.precision=float32")
    assert run(images, tmp_path / "one", *words, "run.shares=2") == 0
    done = launch("scripts/fedtune.py", str(images / "recipe.yaml"), f"run.dir={tmp_path / 'two'}", *words)
    assert done.returncode == 0, done.stderr
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")


@pytest.mark.slow
def test_folders_of_splits_and_another_model(images: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "swin", "swin")
    for split, count in (("train", 48), ("validation", 12)):
        write_folders(tmp_path / "own" / split, count, seed=count)
    own = f"data={{task: image_classification, name: {tmp_path / 'own'}}}"
    more = ("data.train=null", "data.validation=null", f"model.name={tmp_path / 'swin'}", "federation.rounds=1")
    assert run(images, tmp_path / "run", own, *more, "eval.every=1") == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.image=scan"], "data.image: "),
        (["data.image_size=8.5"], "data.image_size"),
        (["data.augment=some"], "data.augment"),
        (["model.name={bert}"], "a model of texts (bert), but the data are images"),
        (["model.name=resnet18"], "has no attention that LoRA could adapt"),
        ([*TEXTS], "a model of images (vit), but the data are texts"),
        ([*TEXTS, "model.name=cnn"], "model.name=cnn: a model of images, found a task of texts"),
    ],
)  # fmt: skip
def test_mistakes_end_with_exit_code_2(
    images: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    places = {"bert": tiny / "bert", "texts": tiny / "train.csv"}
    assert run(images, tmp_path / "run", "--dry-run", *[each.format(**places) for each in overrides]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ALL_WEIGHTS], ids=["adapters", "all weights"])
def test_every_client_is_evaluated_on_its_own_images(images: Path, tmp_path: Path, overrides: Sequence[str]) -> None:
    words = ["eval.per_client=0.3", "local.finetune_steps=2", "federation.held_out=1", "federation.rounds=1"]
    assert run(images, tmp_path / "run", *overrides, *words) == 0
    clients = json.loads((tmp_path / "run" / "client_scores.json").read_text())["clients"]
    assert [each["trains"] for each in clients] == [True] * 5 + [False]
    assert all({"accuracy", "eval_loss"} <= each[kind].keys() for each in clients for kind in ("scores", "finetuned"))
    assert any(each["scores"]["eval_loss"] != each["finetuned"]["eval_loss"] for each in clients)
