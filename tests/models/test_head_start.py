"""Whether the head of a checkpoint is kept: its outputs, its names, and what model.head asks for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, save_tiny, save_tokenizer, tiny_batch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto import CONFIG_MAPPING

from fedllm.common.errors import UserError
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import sequence_head

HEADED = ["bert", "roberta", "distilbert", "gpt2", "llama"]


def trained(folder: Path, family: str, *names: str, outputs: int = 3) -> str:
    """A checkpoint whose head is far from a new one. names: its classes; without any, LABEL_0, LABEL_1, ..."""
    pad = 2 if family in ("gpt2", "llama") else 1
    save_tokenizer(folder, pad=family not in ("gpt2", "llama"))
    labels = dict(enumerate(names)) if names else {index: f"LABEL_{index}" for index in range(outputs)}
    settings: dict[str, Any] = {"vocab_size": 32, "initializer_range": 0.2, **CONFIGS[family], "pad_token_id": pad}
    config = CONFIG_MAPPING[family](**settings, id2label=labels, label2id={n: i for i, n in labels.items()})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return str(folder)


def load(name: str, *classes: str, outputs: int = 3, **settings: Any) -> Backbone:
    head = sequence_head(len(classes) or outputs, label_names=classes or None)
    return load_backbone(ModelSettings(name=name, **settings), head)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**tiny_batch(model.config.pad_token_id)).logits
    return found


def plain(name: str) -> torch.Tensor:
    return logits(AutoModelForSequenceClassification.from_pretrained(name).eval())


def adapted(backbone: Backbone) -> torch.Tensor:
    return logits(attach_lora(backbone, LoraSettings(rank=2)))


@pytest.mark.parametrize("family", HEADED)
def test_a_head_with_as_many_outputs_is_kept_bit_for_bit(tmp_path: Path, family: str) -> None:
    name = trained(tmp_path, family)
    backbone = load(name, "no", "yes", "perhaps")
    assert str(backbone.start) == "kept from the checkpoint (it has as many outputs as the data need)"
    stored = {key: value.clone() for key, value in backbone.model.state_dict().items()}
    model = attach_lora(backbone, LoraSettings(rank=2))
    for path in backbone.head:
        for key, value in model.get_submodule(f"base_model.model.{path}.modules_to_save.default").state_dict().items():
            assert torch.equal(value, stored[f"{path}.{key}"])
    torch.testing.assert_close(logits(model), plain(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", HEADED)
def test_outputs_get_the_order_of_the_data(tmp_path: Path, family: str) -> None:
    """As roberta-large-mnli, whose classes are CONTRADICTION, NEUTRAL, ENTAILMENT."""
    name = trained(tmp_path, family, "CONTRADICTION", "NEUTRAL", "Not_Entailment")
    backbone = load(name, "not entailment", "neutral", "contradiction")
    assert "its outputs now in their order" in str(backbone.start)
    torch.testing.assert_close(adapted(backbone), plain(name)[:, [2, 1, 0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (
            ("a", "b", "c"),
            ("a", "b", "d"),
            "new (the checkpoint's classes are 'a', 'b', 'c', the data's 'a', 'b', 'd')",
        ),
        (("a", "b"), ("a", "b", "c"), "new (the checkpoint's classifier.bias has another shape, for 2 outputs)"),
        (
            ("a", "A", "b"),
            ("a", "b", "c"),
            "new (the checkpoint's classes are 'a', 'A', 'b', the data's 'a', 'b', 'c')",
        ),
        (("a", "b", "c"), ("a", "b", "c"), "kept from the checkpoint (its classes are the data's)"),
    ],
)
def test_names_decide(tmp_path: Path, theirs: tuple[str, ...], ours: tuple[str, ...], said: str) -> None:
    name = trained(tmp_path, "bert", *theirs)
    backbone = load(name, *ours)
    assert str(backbone.start) == said
    kept = said.startswith("kept")
    model = attach_lora(backbone, LoraSettings(rank=2))
    fresh = attach_lora(load(name, *ours, head="new"), LoraSettings(rank=2))
    assert torch.equal(logits(model), logits(fresh)) is not kept


def test_keep_and_new_are_done_as_asked(tmp_path: Path) -> None:
    name = trained(tmp_path / "a", "bert", "a", "b", "c")
    backbone = load(name, "x", "y", "z", head="keep")
    assert "the data's 'x', 'y', 'z'; model.head=keep asks for it" in str(backbone.start)
    torch.testing.assert_close(adapted(backbone), plain(name), rtol=1e-5, atol=1e-5)
    assert str(load(name, "a", "b", "c", head="new").start) == "new (model.head=new asks for it)"
    for folder, settings, why in [
        (name, {"outputs": 2}, "the checkpoint's classifier.bias has another shape, for 3 outputs"),
        (save_tiny(tmp_path / "b", "bert"), {}, "the checkpoint has no classifier.bias"),
        (name, {"pretrained": False}, "the whole model starts from random weights"),
    ]:
        with pytest.raises(UserError, match=f"model.head=keep: .* has no head to keep: {why}"):
            load(folder, head="keep", **settings)


def test_a_checkpoint_without_a_head_starts_as_ever(tmp_path: Path) -> None:
    name = save_tiny(tmp_path, "bert")
    backbone = load(name, "a", "b", "c")
    assert str(backbone.start) == "new (the checkpoint has no classifier.bias)"
    assert torch.equal(adapted(backbone), adapted(load(name, "x", "y", "z", head="new")))


def test_a_regression_keeps_its_one_output(tmp_path: Path) -> None:
    name = trained(tmp_path, "bert", "score")
    backbone = load_backbone(ModelSettings(name=name), sequence_head(1, regression=True))
    assert backbone.start.kept
    torch.testing.assert_close(adapted(backbone), plain(name), rtol=1e-5, atol=1e-5)


def test_a_quantised_base_keeps_its_head(tmp_path: Path) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    name = trained(tmp_path, "bert", "a", "b", "c")
    backbone = load(name, "c", "b", "a", quantize="8bit")
    whole = AutoModelForSequenceClassification.from_pretrained(name)
    assert torch.equal(backbone.model.classifier.weight, whole.classifier.weight[[2, 1, 0]])
    model = attach_lora(backbone, LoraSettings(rank=2))
    kept = model.base_model.model.classifier.modules_to_save.default
    assert torch.equal(kept.weight, whole.classifier.weight[[2, 1, 0]])
    assert torch.equal(kept.bias, whole.classifier.bias[[2, 1, 0]])
