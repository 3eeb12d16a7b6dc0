"""Models for images, sound, experts and state spaces: their blocks without options, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from block_models import context
from peft import LoraConfig, get_peft_model
from torch import nn

from fedllm.blocks import RoleError, find_attention, partition

LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**LAYER, "vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 2}
IMAGE = {**LAYER, "image_size": 8, "patch_size": 4}  # 4 patches, and a class token
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": "p2c|c2p", "max_relative_positions": 8}
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 32,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
           "max_source_positions": 10, "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip

ATTENTION = 4 + 4 + 32 + 32  # query and key by head, value and output by row
MLP = (48 + 1) + (32 + 1)
BLOCK = (ATTENTION + 4) + MLP + 4  # with biases and two norms
SWIN = {16: (2 + 2 + 16 + 16 + 4) + 2 + (64 + 1) + (16 + 1) + 4, 32: (ATTENTION + 4) + 4 + (128 + 1) + (32 + 1) + 4}

COUNTED: dict[str, tuple[Any, int]] = {
    # class token, 5 positions, 32 filters and a bias; a layer; a norm; the pooler
    "vit": (tf.ViTConfig(**IMAGE), 1 + 5 + 33 + BLOCK + 2 + 33),
    # 16 filters, a bias and a norm; two stages, of 2 and 4 heads with a table by head each; the merge; a norm
    "swin": (
        tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
        17 + 2 + SWIN[16] + (32 + 2) + SWIN[32] + 2,
    ),
    # each convolution by filter, with two vectors of batch norm
    "resnet": (
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        (8 + 2) + 2 * (8 + 2) + 3 * (16 + 2),
    ),
    # two convolutions, no key bias, a frozen table of positions in the encoder; the decoder attends twice
    "whisper": (
        tf.WhisperConfig(**WHISPER),
        2 * 33 + (BLOCK - 1) + 2 + (32 + 8) + (BLOCK - 1) + (ATTENTION + 3 + 2) + 2,
    ),
    # 2 key-value heads; the router by expert; 4 experts of 96 and 32 output rows
    "mixtral": (
        tf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4),
        32 + (4 + 2 + 16 + 32) + 4 + 4 * (96 + 32) + 3,
    ),
    # query, key and value fused, with two biases; the projections of positions by head, one with a bias
    "deberta": (tf.DebertaConfig(**RELATIVE), 32 + 16 + 2 + (ATTENTION + 3) + (4 + 4 + 1) + MLP + 4 + 16),
    "deberta-v2": (tf.DebertaV2Config(**RELATIVE, share_att_key=False), 32 + 16 + 2 + BLOCK + 2 * (4 + 1) + 16),
    # the scale; text: tokens, positions, layer, norm; image: class token, filters, positions, norms, layer; projections
    "clip": (
        tf.CLIPConfig(
            text_config={**TEXT, "projection_dim": 16}, vision_config={**IMAGE, "projection_dim": 16}, projection_dim=16
        ),
        1 + (32 + 16 + BLOCK + 2) + (1 + 32 + 5 + 2 + BLOCK + 2) + 2 * 16,
    ),
    # tokens; norm, A_log by channel, D, convolution by channel, in_proj, x_proj, dt_proj, out_proj; norm
    "mamba": (
        tf.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=3),
        32 + (1 + 32 + 1 + 33 + 64 + (3 + 2 * 4) + 33 + 16) + 1,
    ),
}  # fmt: skip


def build(family: str) -> Any:
    torch.manual_seed(0)
    return tf.AutoModel.from_config(COUNTED[family][0])


@pytest.mark.parametrize("family", COUNTED)
def test_blocks_of_a_family(family: str) -> None:
    model = build(family)
    blocks = partition(model)
    assert blocks.num_blocks == COUNTED[family][1]
    assert blocks.dim == sum(p.numel() for p in model.parameters() if p.requires_grad)
    v = torch.rand(blocks.num_blocks, dtype=torch.float64)
    torch.testing.assert_close(blocks.means(blocks.expand(v)), v)
    assert "unknown" not in blocks.table()


@pytest.mark.parametrize(
    ("family", "parameter", "name", "part"),
    [
        ("vit", "embeddings.position_embeddings", "row 3", (0, 3)),
        ("vit", "embeddings.patch_embeddings.projection.weight", "filter 7", (7,)),
        ("resnet", "encoder.stages.1.layers.0.layer.1.convolution.weight", "filter 15", (15,)),
        ("mixtral", "layers.0.mlp.experts.gate_up_proj", "expert row 97", (1, 1)),
        ("mixtral", "layers.0.mlp.gate.weight", "row 2", (2,)),
        ("mamba", "layers.0.mixer.A_log", "row 5", (5,)),
        ("swin", "encoder.layers.1.blocks.0.attention.relative_position_bias.relative_position_bias_table", "head 3",
         (slice(None), 3)),
    ],
)  # fmt: skip
def test_a_block_is_what_its_name_says(family: str, parameter: str, name: str, part: Any) -> None:
    model = build(family)
    blocks = partition(model)
    v = torch.rand(blocks.dim, dtype=torch.float64)
    shape = dict(model.named_parameters())[parameter].shape
    found = blocks.means(v)[blocks.names.index(f"{parameter} {name}")]
    torch.testing.assert_close(found, v[blocks.slices[parameter]].view(shape)[part].mean())


@pytest.mark.parametrize(("family", "projections"), [
    ("deberta", {"pos_proj", "pos_q_proj"}), ("deberta-v2", {"pos_key_proj", "pos_query_proj"}),
])  # fmt: skip
def test_a_head_of_the_positions_moves_its_own_head_alone(family: str, projections: set[str]) -> None:
    model = build(family).eval()
    (attention,) = find_attention(model)
    blocks, output = partition(model), model.get_submodule(attention.output)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    parameters, before = dict(model.named_parameters()), context(model, output)
    seen = set()
    for block, name in enumerate(blocks.names):
        path, _, unit = name.partition(".weight head ")
        if (child := path.rpartition(".")[2]) not in projections:
            continue
        weight = parameters[f"{path}.weight"]
        coordinates = blocks.expand(torch.eye(blocks.num_blocks)[block])[blocks.slices[f"{path}.weight"]]
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(coordinates.view_as(weight) * torch.randn(weight.shape))
        moved = (context(model, output) - before).abs().amax(dim=0) > 1e-6
        with torch.no_grad():
            weight.copy_(kept)
        assert torch.equal(moved, torch.arange(32) // 8 == int(unit)), name
        seen.add((child, int(unit)))
    assert seen == {(child, head) for child in projections for head in range(4)}


def test_convolutions_inside_an_attention() -> None:
    config = tf.NystromformerConfig(**TEXT, conv_kernel_size=5, num_landmarks=4, segment_means_seq_len=16)
    with torch.device("meta"):
        model = tf.AutoModel.from_config(config)
    names = partition(model).names
    assert "encoder.layer.0.attention.self.conv.weight filter 3" in names


def test_a_vector_is_one_block_whatever_its_shape() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.heads = nn.Parameter(torch.zeros(1, 1, 1, 6)), nn.Parameter(torch.zeros(3, 1, 1))

    assert partition(Scale()).sizes.tolist() == [6, 3]
    assert partition(nn.Conv1d(1, 4, 1, bias=False)).sizes.tolist() == [1] * 4


def test_low_rank_factors_of_a_convolution() -> None:
    model = get_peft_model(build("vit"), LoraConfig(r=2, target_modules=["projection", "q_proj"]))
    blocks = partition(model)
    assert blocks.num_blocks == (2 + 32) + (2 + 4)
    assert "embeddings.patch_embeddings.projection.lora_B row 31" in blocks.names


def test_transposed_convolutions() -> None:
    """[in, out, kernel]: a filter has coordinates in each row. With groups, the filters of the groups lie apart."""
    layer = nn.ConvTranspose1d(3, 5, 2, bias=False)
    blocks = partition(layer)
    v = torch.rand(blocks.dim)
    assert blocks.names == [f"weight filter {i}" for i in range(5)]
    torch.testing.assert_close(blocks.means(v), v.view(3, 5, 2).mean(dim=(0, 2)))
    with pytest.raises(RoleError, match=r"weight \[4, 1, 2\]"):
        partition(nn.ConvTranspose1d(4, 2, 2, groups=2))


def test_what_only_looks_like_a_token_or_experts_has_no_role() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 4, 2, 2))
            self.experts = nn.Parameter(torch.zeros(2, 3, 4))
            self.token = nn.Parameter(torch.zeros(1, 2, 4))

    with pytest.raises(RoleError, match=r"pos_embed .*experts .*token "):
        partition(Bare())
