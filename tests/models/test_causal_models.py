"""Causal language models: loading, LoRA and blocks of eight architectures, and checkpoints that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_checkpoints import FAMILIES, TEMPLATE, save_causal
from tiny_models import save_tiny, save_tokenizer, tiny_batch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto import CONFIG_MAPPING

from fedllm.blocks import partition
from fedllm.common.errors import UserError
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora, head_modules, lora_layers, trainable_names
from fedllm.models.lora_targets import find_targets
from fedllm.models.outline import add_lora, load_outline
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import language_head, sequence_head

ROLES = {"query-value": ["query", "value"], "mlp": ["mlp"], "all": ["all-linear"]}
ALL = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
}
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family -> folder of its tiny checkpoint."""
    root = tmp_path_factory.mktemp("causal")
    return {family: save_causal(root / family, family) for family in FAMILIES}


def load(name: str | Path, **model: Any) -> Backbone:
    return load_backbone(ModelSettings(name=str(name), **model), language_head())


def roles_of(family: str, roles: str) -> list[str]:
    """The roles; Phi-3's query and value cannot be had without its key."""
    return ["query", "key", "value"] if (family, roles) == ("phi3", "query-value") else ROLES[roles]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_is_frozen_with_its_head(causal: dict[str, str], family: str) -> None:
    backbone = load(causal[family])
    plain = AutoModelForCausalLM.from_pretrained(causal[family]).eval()
    assert (backbone.head, backbone.task_type, backbone.max_length, backbone.notes) == ((), "CAUSAL_LM", 64, ())
    assert type(backbone.model) is type(plain)
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    theirs = plain.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in backbone.model.state_dict().items())
    assert backbone.tokenizer.eos_token == "</s>"
    assert backbone.tokenizer.pad_token == ("<|endoftext|>" if family == "qwen2" else "</s>")  # Qwen's has a pad token
    assert backbone.tokenizer.chat_template == TEMPLATE
    assert backbone.model.generation_config.repetition_penalty == 1.3
    assert str(backbone.start) == "the language model's output embedding, from the checkpoint"
    batch = tiny_batch(backbone.tokenizer.pad_token_id)
    with torch.no_grad():
        ours, wanted = (model(**batch).logits for model in (backbone.model, plain))
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_alone_is_trained_and_starts_at_the_base(causal: dict[str, str], family: str, roles: str) -> None:
    """Oracle 13: with B = 0, the loss is that of the base."""
    model = attach_lora(load(causal[family]), LoraSettings(rank=2, targets=roles_of(family, roles)))
    assert head_modules(model) == []
    assert all(".lora_A." in name or ".lora_B." in name for name in trainable_names(model))
    assert all(model.get_parameter(name).dtype == torch.float32 for name in trainable_names(model))
    layers = lora_layers(model)
    assert not any("lm_head" in path or "embed" in path for path in layers)
    if roles == "all":
        assert {path.rpartition(".")[2] for path in layers} == ALL.get(family, LLAMA)
    plain = AutoModelForCausalLM.from_pretrained(causal[family]).eval()
    batch = tiny_batch(2)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    torch.testing.assert_close(loss, plain(**batch, labels=labels).loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    grads = {name: model.get_parameter(name).grad for name in trainable_names(model)}
    assert all(grads[name] is not None and bool(grads[name].any()) == (".lora_B." in name) for name in grads)


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_an_adapter(causal: dict[str, str], family: str, roles: str) -> None:
    """An A has a block for each of its r rows. A B has one per head for query and key, and one per row for the rest;
    the outline, built of the config alone, has the same blocks."""
    targets = roles_of(family, roles)
    model = attach_lora(load(causal[family]), LoraSettings(rank=2, targets=targets))
    found = partition(model)
    assert found.dim == sum(model.get_parameter(name).numel() for name in trainable_names(model))
    of_a = sum(".lora_A." in name for name in trainable_names(model))
    assert sum(".lora_A row " in name for name in found.names) == 2 * of_a
    if (family, roles) == ("llama", "query-value"):
        assert found.num_blocks == 2 * (2 + 4 + 2 + 16)  # A_q, B_q by its 4 heads, A_v, B_v by its 16 rows
    outline = load_outline(causal[family])
    adapted = add_lora(outline, find_targets(outline, family, targets), 2)
    assert [name for name in partition(adapted).names if "lora_" in name] == list(found.names)


def test_bfloat16_and_random_starts(causal: dict[str, str]) -> None:
    low = attach_lora(load(causal["llama"], dtype="bfloat16"), LoraSettings(rank=2))
    assert low.get_base_model().lm_head.weight.dtype == torch.bfloat16
    assert {low.get_parameter(name).dtype for name in trainable_names(low)} == {torch.float32}
    fresh = load(causal["gpt2"], pretrained=False)
    assert not torch.equal(fresh.model.lm_head.weight, load(causal["gpt2"]).model.lm_head.weight)
    assert torch.equal(fresh.model.lm_head.weight, load(causal["gpt2"], pretrained=False).model.lm_head.weight)


def test_a_base_without_a_chat_template_is_noted(tmp_path: Path) -> None:
    name = save_causal(tmp_path, "llama", template=None)
    (note,) = load(name).notes
    assert note == f"model '{name}' has no chat template: it is a base model, and conversations need data.template"
    assert load_backbone(ModelSettings(name=name), sequence_head(2)).notes == ()


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_quantised_model_keeps_its_output_embedding(causal: dict[str, str], family: str, quantize: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = load(causal[family], quantize=quantize).model
    low = {
        name for name, module in model.named_modules() if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))
    }
    assert "lm_head" not in low
    if family == "llama":
        assert {name.rpartition(".")[2] for name in low} == LLAMA
    assert model.lm_head.weight.dtype == torch.float32
    assert model(**tiny_batch(2)).logits.isfinite().all()


# -- checkpoints that are no causal language models -------------------------------------------------------------------

_LAYERED = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
OTHERS = {
    "t5": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}, r"an encoder-decoder \(t5\)"),
    "bart": ({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, r"an encoder-decoder \(bart\)"),
    "bert": (_LAYERED, r"a masked language model \(bert\), whose tokens see those behind them"),
    "roberta": (_LAYERED, r"a masked language model \(roberta\)"),
    "distilbert": ({"dim": 32, "n_layers": 1, "n_heads": 4}, r"a model of type distilbert, which transformers has no"),
    "gemma3": ({}, r"a model of texts and other inputs \(gemma3\)"),
}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("pretrained", [True, False])
def test_models_of_another_kind_are_refused(tmp_path: Path, family: str, pretrained: bool) -> None:
    settings, message = OTHERS[family]
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, pad=True)
    (tmp_path / "model.safetensors").touch()  # the config alone is read
    with pytest.raises(UserError, match=rf"model\.name={tmp_path}: found {message}.*expects a causal language model"):
        load(tmp_path, pretrained=pretrained)


def test_a_bert_that_is_a_decoder_is_taken(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", is_decoder=True)
    assert type(load(tmp_path, pretrained=False).model).__name__ == "BertLMHeadModel"


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    name = save_tiny(tmp_path, "llama", headless=False, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"found a checkpoint of LlamaForSequenceClassification, which has no output"):
        load(name)
    load(name, pretrained=False)


def test_an_output_embedding_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of the frozen parameters are not in the checkpoint.*lm_head\.weight"):
        load(save_tiny(tmp_path, "qwen2"))


def test_settings_that_do_not_fit(causal: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.head=new: .* is a language model, whose head is its output embedding"):
        load(causal["llama"], head="new")
    assert load(causal["llama"], head="keep").start.setting == "keep"
    with pytest.raises(UserError, match=r"found mlp_gate, but model .* has none"):
        attach_lora(load(causal["gpt2"]), LoraSettings(rank=2, targets=["mlp_gate"]))
    name = save_causal(tmp_path, "llama", vocab_size=20)
    with pytest.raises(UserError, match="24 tokens, but the model only 20"):
        load(name)


def test_a_classifier_of_a_language_model_is_as_it_was(causal: dict[str, str]) -> None:
    backbone = load_backbone(ModelSettings(name=causal["qwen2"]), sequence_head(3))
    assert backbone.head == ("score",)
    assert isinstance(backbone.model, type(AutoModelForSequenceClassification.from_config(backbone.model.config)))
