"""Models built from their config alone have the same trained weights as loaded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers as tf
from tiny_models import FAMILIES, save_tiny

from fedllm.blocks import partition
from fedllm.common.errors import UserError
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.lora_targets import find_targets
from fedllm.models.outline import add_lora, highest_rank, load_outline
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import sequence_head

QUERY_VALUE = ["query", "value"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_outline_has_the_blocks_of_the_model_that_is_trained(family: str, tmp_path: Path) -> None:
    name = save_tiny(tmp_path, family)
    settings = ModelSettings(name=name, pretrained=False)
    trained = partition(attach_lora(load_backbone(settings, sequence_head(2)), LoraSettings(rank=2)))
    outline = load_outline(name)
    assert all(parameter.is_meta for parameter in outline.parameters())
    adapted = add_lora(outline, find_targets(outline, name, QUERY_VALUE), 2)
    assert partition(adapted).names == trained.names
    assert partition(adapted).sizes.tolist() == trained.sizes.tolist()


def test_neither_weights_nor_a_tokenizer_are_read(tmp_path: Path) -> None:
    tf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=8,
                 patch_size=4, architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)  # fmt: skip
    outline = load_outline(str(tmp_path))
    assert type(outline).__name__ == "ViTForImageClassification"
    targets = find_targets(outline, "vit", QUERY_VALUE)
    assert highest_rank(outline, targets) == 32
    names = partition(add_lora(outline, targets, 2)).names
    assert "classifier.weight row 1" in names
    assert not any("patch" in name for name in names)


def test_the_head_of_a_language_model_stays_frozen(tmp_path: Path) -> None:
    tf.WhisperConfig(vocab_size=32, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                     decoder_attention_heads=4, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                     architectures=["WhisperForConditionalGeneration"]).save_pretrained(tmp_path)  # fmt: skip
    outline = load_outline(str(tmp_path))
    trained = add_lora(outline, find_targets(outline, "whisper", QUERY_VALUE), 2)
    assert all("lora_" in name for name, p in trained.named_parameters() if p.requires_grad)


def test_the_whole_cause_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UserError, match=r"cannot be built from its config: .*no-such-model") as error:
        load_outline(str(tmp_path))
    cause = str(error.value.__cause__).strip()
    assert len(cause.splitlines()) > 1
    assert str(error.value).endswith(cause)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]), "ResNetModel has no attention"),
        (
            tf.Phi3Config(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=48,
                vocab_size=32,
                pad_token_id=0,
            ),
            "qkv_proj is a fused Linear",
        ),
        (tf.CTRLConfig(vocab_size=32, n_embd=32, dff=48, n_layer=1, n_head=4), "no known attention layout"),
    ],
)
def test_a_model_without_layers_for_lora_says_why(config: tf.PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        find_targets(load_outline(str(tmp_path)), "x", QUERY_VALUE)
