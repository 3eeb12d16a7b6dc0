"""Merged models: plain transformers reads them to the same logits, without PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models import FAMILIES, save_tiny, tiny_batch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from fedllm.common.errors import UserError
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora, trainable_names
from fedllm.models.merged_files import merge, save_merged
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.models.structure import SplitQKV, split_fused
from fedllm.tasks.heads import sequence_head

ROLES = [["query", "value"], ["key", "output"], ["mlp"], ["all-linear"]]
HEAD = sequence_head(3, label_names=["no", "yes", "perhaps"])


def trained(
    name: str, roles: list[str], scaling: str = "standard", dora: bool = False, **model: str
) -> tuple[PeftModel, object]:
    """A model all of whose trainable values are random, and its tokenizer."""
    backbone = load_backbone(ModelSettings(name=name, **model), HEAD)
    adapted = attach_lora(backbone, LoraSettings(rank=2, alpha=6.0, targets=roles, scaling=scaling, dora=dora))
    rng = torch.Generator().manual_seed(1)
    for path in trainable_names(adapted):
        parameter = adapted.get_parameter(path)
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
    return adapted, backbone.tokenizer


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    return model(**tiny_batch(model.config.pad_token_id)).logits


@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_gives_the_same_logits(tmp_path: Path, family: str, roles: list[str]) -> None:
    name = save_tiny(tmp_path / "base", family)
    model, tokenizer = trained(name, roles)
    before = logits(model)
    folder = save_merged(model, tmp_path / "merged", tokenizer, "a card\n")
    merged, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(merged.eval()), before, atol=1e-5, rtol=1e-5)
    assert merged.config.id2label == {0: "no", 1: "yes", 2: "perhaps"}
    assert (folder / "README.md").read_text() == "a card\n"
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("adapter*"))
    base = AutoModelForSequenceClassification.from_pretrained(name, num_labels=3)
    assert [(key, value.shape) for key, value in merged.state_dict().items()] == [
        (key, value.shape) for key, value in base.state_dict().items()
    ]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_rslora_is_merged_with_its_scale(tmp_path: Path, family: str) -> None:
    model, _ = trained(save_tiny(tmp_path / "base", family), ["query", "value"], "rslora")
    before = logits(model)
    torch.testing.assert_close(logits(merge(model).eval()), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_dora_is_merged_with_its_lengths(tmp_path: Path, family: str) -> None:
    model, _ = trained(save_tiny(tmp_path / "base", family), ["query", "value", "mlp"], dora=True)
    before = logits(model)
    torch.testing.assert_close(logits(merge(model).eval()), before, atol=1e-5, rtol=1e-5)


def test_a_kept_head_stays_and_only_the_adapter_is_added(tmp_path: Path) -> None:
    """The B of the adapter is 0 at the start, so that the merged model is the checkpoint."""
    name = save_tiny(tmp_path / "base", "bert", headless=False, num_labels=3)
    backbone = load_backbone(ModelSettings(name=name, head="keep"), HEAD)
    folder = save_merged(attach_lora(backbone, LoraSettings(rank=2)), tmp_path / "merged")
    first, second = (AutoModelForSequenceClassification.from_pretrained(path) for path in (name, folder))
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    name = save_tiny(tmp_path / "base", "gpt2")
    model, _ = trained(name, ["query", "value"], dtype="bfloat16")
    before = logits(model)
    merged = AutoModelForSequenceClassification.from_pretrained(save_merged(model, tmp_path / "merged"))
    assert {value.dtype for value in merged.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(merged).float(), before, atol=0.1, rtol=0.1)


def test_fused_is_the_inverse_of_taking_apart(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(save_tiny(tmp_path / "base", "gpt2"))
    before = model.transformer.h[1].attn.c_attn
    split_fused(model, "gpt2")
    split = model.transformer.h[1].attn.c_attn
    assert isinstance(split, SplitQKV)
    assert torch.equal(split.fused().weight, before.weight)
    assert torch.equal(split.fused().bias, before.bias)
    assert (split.fused().nf, split.fused().nx) == (before.nf, before.nx)


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    model, _ = trained(save_tiny(tmp_path / "base", "bert"), ["query"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="full: exists already and is not empty"):
        save_merged(model, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    folder = save_merged(model, tmp_path / "empty")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "empty", "full"]
