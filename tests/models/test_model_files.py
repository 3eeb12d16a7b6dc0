"""Plain folders of models whose weights were all trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from full_models import Pixels, resnet
from tiny_models import save_tiny
from transformers import GPT2LMHeadModel, ResNetForImageClassification

from fedllm.common.errors import UserError
from fedllm.models.all_weights import start_digest, train_all
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import load_backbone
from fedllm.models.model_files import save_model
from fedllm.models.norms import apply_norm, statistics, write_statistics
from fedllm.models.settings import ModelSettings
from fedllm.tasks.heads import language_head, sequence_head


def test_running_statistics_are_saved_with_the_weights(tmp_path: Path) -> None:
    model = resnet()
    values = torch.rand(statistics(model).dim) + 0.5
    write_statistics(model, values)
    folder = save_model(model, tmp_path / "model", card="# A card\n")  # type: ignore[arg-type]
    assert (folder / "README.md").read_text() == "# A card\n"
    assert (folder / "model.safetensors").is_file()
    loaded = ResNetForImageClassification.from_pretrained(folder).eval()
    named = dict(loaded.named_buffers())
    assert torch.equal(torch.cat([named[name].flatten() for name in statistics(loaded).names]), values)
    images = Pixels.draw(2).values
    assert torch.equal(loaded(images).logits, model.eval()(images).logits)


def test_group_norm_comes_back_by_apply_norm(tmp_path: Path) -> None:
    """What the model card says for a config that cannot say it."""
    model = resnet()
    apply_norm(model, "group", "tiny")
    folder = save_model(model, tmp_path / "model")  # type: ignore[arg-type]
    loaded = ResNetForImageClassification.from_pretrained(folder).eval()
    apply_norm(loaded, "group", "tiny")
    images = Pixels.draw(2, side=32).values
    assert torch.equal(loaded(images).logits, model.eval()(images).logits)


def test_a_model_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    folder = save_model(resnet(), tmp_path / "model", card="old")  # type: ignore[arg-type]
    save_model(resnet(), folder)  # type: ignore[arg-type]
    assert not (folder / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for place in (tmp_path / "mine", tmp_path / "mine" / "notes.txt"):
        with pytest.raises(UserError, match=r"is no model \(config.json is not in it\), so it is not replaced"):
            save_model(resnet(), place)  # type: ignore[arg-type]


def test_a_backbone_with_all_weights_trains_all_of_them_in_float32(tmp_path: Path) -> None:
    name = save_tiny(tmp_path / "bert", "bert")
    settings = ModelSettings(name=name)
    models = [
        train_all(load_backbone(settings, sequence_head(3), seed=seed), settings, seed=seed) for seed in (0, 0, 1)
    ]
    assert all(value.requires_grad and value.dtype == torch.float32 for value in models[0].parameters())
    same, again, other = (start_digest(ParameterSpace.of(model).gather(model)) for model in models)
    assert same == again != other


def test_a_language_model_from_random_weights_is_saved_with_its_tied_head(tmp_path: Path) -> None:
    settings = ModelSettings(name=save_tiny(tmp_path / "gpt2", "gpt2"), pretrained=False)
    backbone = load_backbone(settings, language_head())
    model = train_all(backbone, settings)
    space = ParameterSpace.of(model)
    assert "lm_head.weight" not in space.names  # it is the embedding
    x = space.gather(model)
    space.scatter(model, x + 0.01)
    folder = save_model(model, tmp_path / "model", backbone.tokenizer)
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    assert torch.equal(space.gather(loaded), x + 0.01)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
