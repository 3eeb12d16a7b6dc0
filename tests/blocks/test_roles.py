"""Which role each weight gets: every way PEFT and quantisation hide a layer, every attention layout, every refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import CONFIGS, FAMILIES
from torch import nn
from transformers.models.auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from fedllm.blocks import BlockPartition, RoleError, find_attention, partition

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT on Conv1D

QKV = ["query", "key", "value"]
QKV_PROJ = ["q_proj", "k_proj", "v_proj"]


def build(family: str, **changes: Any) -> Any:
    """A sequence classifier: hidden 32, 2 layers, 4 heads (2 key-value heads in Llama and Qwen2), 3 classes."""
    config = CONFIG_MAPPING[family](**{"vocab_size": 32, "num_labels": 3, **CONFIGS[family], **changes})
    return tf.AutoModelForSequenceClassification.from_config(config)


def lora(model: nn.Module, targets: list[str], adapter: str = "default", **options: Any) -> PeftModel:
    """The model under LoRA of rank 4; nothing else is trained, the head included, unless modules_to_save says so."""
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options), adapter_name=adapter)


def check_block(bp: BlockPartition, parameter: str, shape: tuple[int, int], part: Any, name: str) -> None:
    """The block called `name` is the mean of that part of the one parameter whose path ends in `parameter`."""
    v = torch.rand(bp.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (where,) = [where for path, where in bp.slices.items() if path.endswith(parameter)]
    torch.testing.assert_close(bp.means(v)[bp.names.index(name)], v[where].view(shape)[part].mean())


# Low-rank factors


def test_bert_under_lora() -> None:
    bp = partition(lora(build("bert"), QKV, modules_to_save=["classifier"]))
    assert bp.num_blocks == 2 * (3 * 4 + 4 + 4 + 32) + 3 + 1
    layer = "encoder.layer.0.attention.self"
    check_block(bp, f"{layer}.query.lora_B.default.weight", (32, 4), slice(8, 16), f"bert.{layer}.query.lora_B head 1")
    check_block(bp, f"{layer}.value.lora_B.default.weight", (32, 4), 5, f"bert.{layer}.value.lora_B row 5")
    check_block(bp, f"{layer}.key.lora_A.default.weight", (4, 32), 2, f"bert.{layer}.key.lora_A row 2")
    check_block(bp, "classifier.modules_to_save.default.weight", (3, 32), 2, "classifier.weight row 2")


def test_grouped_query_attention_under_lora() -> None:
    bp = partition(lora(build("llama", head_dim=16), QKV_PROJ))
    layer = "model.layers.1.self_attn"
    check_block(bp, f"{layer}.k_proj.lora_B.default.weight", (32, 4), slice(16, 32), f"{layer}.k_proj.lora_B head 1")
    check_block(bp, f"{layer}.q_proj.lora_B.default.weight", (64, 4), slice(48, 64), f"{layer}.q_proj.lora_B head 3")
    assert bp.num_blocks == 2 * (3 * 4 + 4 + 2 + 32)


def test_fused_projection_under_lora() -> None:
    bp = partition(lora(build("gpt2"), ["c_attn", "c_proj"]))
    fused, name = "h.1.attn.c_attn.lora_B.default.weight", "transformer.h.1.attn.c_attn.lora_B"
    check_block(bp, fused, (96, 4), slice(24, 32), f"{name} query head 3")
    check_block(bp, fused, (96, 4), slice(32, 40), f"{name} key head 0")
    check_block(bp, fused, (96, 4), 95, f"{name} value row 31")


def test_mlps_under_lora() -> None:
    """Phi-3's gate and up fused, and its down projection; GPT-2's, whose base is stored [in, out]."""
    phi = tf.AutoModel.from_config(tf.Phi3Config(**SMALL, num_key_value_heads=2, intermediate_size=48, pad_token_id=0))
    bp = partition(lora(phi, ["gate_up_proj", "down_proj"]))
    assert bp.num_blocks == 2 * ((4 + 96) + (4 + 32))
    name = "layers.1.mlp.gate_up_proj"
    check_block(bp, f"{name}.lora_B.default.weight", (96, 4), 50, f"{name}.lora_B row 50")
    check_block(bp, f"{name}.lora_A.default.weight", (4, 32), 3, f"{name}.lora_A row 3")
    bp = partition(lora(build("gpt2"), ["c_fc", "mlp.c_proj"]))
    name = "transformer.h.1.mlp.c_fc"
    check_block(bp, "h.1.mlp.c_fc.lora_B.default.weight", (128, 4), 100, f"{name}.lora_B row 100")
    check_block(bp, "h.1.mlp.c_proj.lora_A.default.weight", (4, 128), 1, "transformer.h.1.mlp.c_proj.lora_A row 1")


def test_fused_linear_projections_under_lora() -> None:
    """Phi-3's with grouped queries; GPT-NeoX's head by head."""
    phi = tf.AutoModel.from_config(tf.Phi3Config(**SMALL, num_key_value_heads=2, intermediate_size=48, pad_token_id=0))
    bp = partition(lora(phi, ["qkv_proj"]))
    assert bp.num_blocks == 2 * (4 + 4 + 2 + 16)
    name = "layers.0.self_attn.qkv_proj.lora_B"
    check_block(bp, f"{name}.default.weight", (64, 4), slice(32, 40), f"{name} key head 0")
    check_block(bp, f"{name}.default.weight", (64, 4), 63, f"{name} value row 15")
    bp = partition(lora(tf.AutoModel.from_config(tf.GPTNeoXConfig(**SMALL, intermediate_size=48)), ["query_key_value"]))
    assert bp.num_blocks == 2 * (4 + 4 + 4 + 32)
    name = "layers.1.attention.query_key_value.lora_B"
    check_block(bp, f"{name}.default.weight", (96, 4), slice(24, 32), f"{name} query head 1")
    check_block(bp, f"{name}.default.weight", (96, 4), slice(80, 88), f"{name} key head 3")
    check_block(bp, f"{name}.default.weight", (96, 4), 47, f"{name} value row 15")


class OwnFused(nn.Module):
    """A fused attention of our own that keeps its number of heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.Wqkv, self.Wo = 2, nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)


def test_fused_projection_with_a_head_count_of_its_own() -> None:
    assert partition(OwnFused()).num_blocks == (2 + 2 + 8) + 8


def test_fused_projection_taken_apart() -> None:
    model = build("gpt2")
    before = partition(model).num_blocks
    for layer in model.transformer.h:
        layer.attn.c_attn = nn.ModuleDict({role: nn.Linear(32, 32) for role in QKV})
    first = find_attention(model)[0]
    assert (first.name, first.query) == ("transformer.h.0.attn", "transformer.h.0.attn.c_attn.query")
    assert (first.value, first.output) == ("transformer.h.0.attn.c_attn.value", "transformer.h.0.attn.c_proj")
    assert not first.fused
    assert partition(model).num_blocks == before + 2 * 2  # three biases where there was one
    bp = partition(lora(model, ["query", "value"]))
    assert bp.num_blocks == 2 * (4 + 4 + 4 + 32)
    query = "transformer.h.0.attn.c_attn.query.lora_B"
    check_block(bp, f"{query}.default.weight", (32, 4), slice(16, 24), f"{query} head 2")


@pytest.mark.parametrize("kdim", [8, 6])
def test_multihead_attention(kdim: int) -> None:
    """One in_proj_weight; or a weight each, where the key's inputs differ in number."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=kdim)})
    bp = partition(model)
    assert bp.num_blocks == (2 + 2 + 8) + 1 + 8 + 1
    if kdim == 8:
        check_block(bp, "in_proj_weight", (24, 8), slice(12, 16), "attention.in_proj_weight key head 1")
    else:
        check_block(bp, "k_proj_weight", (8, 6), slice(4, 8), "attention.k_proj_weight head 1")
    (attention,) = find_attention(model)
    assert attention.query == attention.key == attention.value == attention.name == "attention"
    assert (attention.output, attention.num_heads, attention.head_dim) == ("attention.out_proj", 2, 4)


def test_multihead_attention_under_lora() -> None:
    bp = partition(lora(nn.Sequential(nn.MultiheadAttention(8, 2)), ["0"]))
    assert bp.num_blocks == (4 + 8) + 4 + (2 + 2 + 8)  # out_proj's A and B, then the fused A and B
    check_block(bp, "0.lora_B.default.weight", (24, 4), slice(4, 8), "0.lora_B query head 1")


def test_dora_embedding_lora_and_adapter_name() -> None:
    model = lora(build("bert"), ["query", "word_embeddings"], adapter="mine", use_dora=True)
    bp = partition(model)
    table = 4 + 32 + 1  # A by rank direction, B by row, the magnitude whole
    assert bp.num_blocks == table + 2 * (4 + 4 + 1)
    assert "bert.encoder.layer.0.attention.self.query.lora_B.mine.weight head 3" in bp.names
    assert find_attention(model)[0].query.endswith("layer.0.attention.self.query")


def test_a_projection_trained_whole() -> None:
    bp = partition(lora(build("bert"), ["value"], modules_to_save=["query"]))
    assert bp.num_blocks == 2 * (4 + 32) + 2 * (4 + 1)
    assert "bert.encoder.layer.1.attention.self.query.weight head 3" in bp.names


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_under_lora_are_the_plain_ones_and_the_factors(family: str) -> None:
    model = build(family)
    plain = partition(model).num_blocks
    adapted = lora(model, {"gpt2": ["c_attn"], "distilbert": ["q_lin"]}.get(family, ["query", "q_proj"]))
    factors = partition(adapted).num_blocks
    assert partition(adapted, trainable_only=False).num_blocks == plain + factors


class Packed(nn.Linear):
    """A linear layer as bitsandbytes stores it in four bits: two weights a byte, in one column."""

    def __init__(self, inputs: int, outputs: int, source_cls: type = nn.Linear) -> None:
        super().__init__(inputs, outputs, bias=False)
        packed = torch.zeros(inputs * outputs // 2, 1, dtype=torch.uint8)
        self.weight, self.source_cls = nn.Parameter(packed, requires_grad=False), source_cls


def test_quantised_weights() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = Packed(32, 32), Packed(48, 32)
    adapted = lora(model, QKV_PROJ)
    assert partition(adapted).num_blocks == 2 * (3 * 4 + 4 + 2 + 16)
    with pytest.raises(RoleError, match=r"q_proj.base_layer.weight \[512, 1\].*mlp.down_proj.weight \[768, 1\]"):
        partition(adapted, trainable_only=False)


def test_quantised_conv1d() -> None:
    model = build("gpt2")
    for layer in model.transformer.h:
        layer.attn.c_attn = Packed(32, 96, source_cls=Conv1D)
    assert partition(lora(model, ["c_attn"])).num_blocks == 2 * (4 + 4 + 4 + 32)


class OwnLora(nn.Module):
    """LoRA without PEFT: the factors are parameters of the wrapper itself."""

    def __init__(self, layer: nn.Linear, b_shape: tuple[int, int]) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.zeros(4, 32)), nn.Parameter(torch.zeros(b_shape))


def test_lora_of_our_own() -> None:
    model = build("bert").requires_grad_(False)
    attention = model.bert.encoder.layer[0].attention.self
    query = attention.query
    attention.query = OwnLora(query, (32, 4))
    bp = partition(model)
    assert bp.names[:5] == [f"bert.encoder.layer.0.attention.self.query.lora_{x}" for x in
                            ("A row 0", "A row 1", "A row 2", "A row 3", "B head 0")]  # fmt: skip
    attention.query = OwnLora(query, (4, 32))
    with pytest.raises(RoleError, match=r"query.lora_B \[4, 32\]"):
        partition(model)


# Where attention is


@pytest.mark.parametrize(
    ("family", "query", "output", "key_value_heads"),
    [
        ("bert", "attention.self.query", "attention.output.dense", 4),
        ("roberta", "attention.self.query", "attention.output.dense", 4),
        ("distilbert", "attention.q_lin", "attention.out_lin", 4),
        ("gpt2", "attn.c_attn", "attn.c_proj", 4),
        ("llama", "self_attn.q_proj", "self_attn.o_proj", 2),
        ("qwen2", "self_attn.q_proj", "self_attn.o_proj", 2),
    ],
)
def test_find_attention(family: str, query: str, output: str, key_value_heads: int) -> None:
    plain = build(family)
    for model in (plain, lora(copy.deepcopy(plain), [query.rpartition(".")[-1]])):
        found = find_attention(model)
        assert len(found) == 2
        last = found[-1]
        assert last.query.endswith(f".1.{query}")
        assert last.output.endswith(f".1.{output}")
        assert (last.num_heads, last.num_kv_heads, last.head_dim) == (4, key_value_heads, 8)
        assert last.fused == (family == "gpt2")
        paths = {last.query, last.key, last.value, last.output}
        assert len(paths) == (2 if last.fused else 4)
        assert all(model.get_submodule(path) for path in paths)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
RELATIVE = {"relative_attention": True, "pos_att_type": "p2c|c2p", "share_att_key": True}
OTHERS = {
    "albert": tf.AlbertConfig(**SMALL, embedding_size=16, intermediate_size=48),
    "deberta": tf.DebertaV2Config(**SMALL, **RELATIVE, intermediate_size=48, max_position_embeddings=16),
    "electra": tf.ElectraConfig(**SMALL, embedding_size=16, intermediate_size=48),
    "gemma": tf.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=48),
    "opt": tf.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=16),
    "t5": tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=32),
    "vit": tf.ViTConfig(**SMALL | {"vocab_size": None}, intermediate_size=48, image_size=8, patch_size=4),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str) -> None:
    model = tf.AutoModel.from_config(OTHERS[family])
    found, bp = find_attention(model), partition(model)
    # ALBERT's layers share one set of weights; T5 has one attention in its encoder and two in its decoder.
    assert len(found) == {"albert": 1, "t5": 3}.get(family, 2)
    assert {(attention.num_heads, attention.head_dim) for attention in found} == {(4, 8)}
    for attention in found:
        assert sum(name.startswith(f"{attention.query}.weight head") for name in bp.names) == 4


def test_a_backbone_inside_another_module_keeps_its_config() -> None:
    backbone = build("qwen2")
    model = nn.ModuleDict({"backbone": backbone, "top": nn.Linear(3, 2)})
    assert find_attention(model)[1].query == "backbone.model.layers.1.self_attn.q_proj"
    assert partition(model).num_blocks == partition(backbone).num_blocks + 2 + 1


def test_a_head_with_a_config_that_peft_copied() -> None:
    model = tf.AutoModelForSequenceClassification.from_config(OTHERS["deberta"])
    adapted = lora(model, ["query_proj", "value_proj"], modules_to_save=["pooler", "classifier"])
    pooler = adapted.base_model.model.pooler.modules_to_save["default"]
    assert pooler.config is not model.config  # that with which the attention was found
    assert partition(adapted).num_blocks == 2 * (4 + 4 + 4 + 32) + (32 + 1) + (2 + 1)


def test_two_attentions_may_share_a_projection() -> None:
    model = build("qwen2")
    before = partition(model).num_blocks
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj = first.k_proj
    assert len(find_attention(model)) == 2
    assert partition(model).num_blocks == before - (2 + 1)


def test_roles_come_from_modules_not_from_what_names_contain() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "query_classifier": nn.Linear(4, 6), "query": nn.Linear(6, 3)})
    assert find_attention(model) == []
    assert partition(model).num_blocks == 7 + (6 + 1) + (3 + 1)


# Refusals


class Laid(nn.Module):
    """Laid out as attention, with `output` as the name of its last projection."""

    def __init__(self, output: str, **config: int) -> None:
        super().__init__()
        for name in [*QKV_PROJ, output]:
            setattr(self, name, nn.Linear(8, 8))
        if config:
            self.config = SimpleNamespace(**config)


def test_our_own_attention_with_a_config() -> None:
    assert partition(Laid("o_proj", num_attention_heads=2, hidden_size=8)).num_blocks == (2 + 2 + 8 + 8) + 4


def changed(model: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(model.config, name, value)
    return model


def with_child(model: Any, path: str, child: nn.Module) -> Any:
    model.set_submodule(path, child)
    return model


BART = tf.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                     decoder_attention_heads=8, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=32)  # fmt: skip
CTRL = tf.CTRLConfig(vocab_size=32, n_embd=32, dff=48, n_layer=2, n_head=4, pad_token_id=0)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head_dim": (lambda: changed(build("llama"), head_dim=4), "q_proj.weight has 32 outputs, expected 16"),
    "kv heads": (lambda: changed(build("llama"), num_key_value_heads=4), "k_proj.weight has 16 outputs, expected 32"),
    "own count": (lambda: changed(build("bert"), num_attention_heads=8), "num_attention_heads is 4, but BertConfig"),
    "decoder's count": (lambda: tf.AutoModel.from_config(BART), "num_heads is 8, but BartConfig has 4 heads"),
    "indivisible": (lambda: changed(build("gpt2"), n_embd=30), "4 heads but hidden_size 30"),
    "cross": (lambda: build("gpt2", add_cross_attention=True), "c_attn.weight has 64 outputs, expected 96"),
    "no config": (lambda: Laid("o_proj"), "Laid is laid out as attention, but no enclosing module has a config"),
    "no output": (lambda: Laid("last"), "Laid has the query, key and value.*expected o_proj or out_proj"),
    "fused linear": (
        lambda: with_child(build("gpt2"), "transformer.h.0.attn.c_attn", nn.Linear(32, 96)),
        "c_attn is a Linear; the order of query, key and value",
    ),
    "not linear": (
        lambda: with_child(build("llama"), "model.layers.0.self_attn.v_proj", nn.Identity()),
        "v_proj should be a linear layer, found Identity",
    ),
    "output": (
        lambda: with_child(build("llama"), "model.layers.0.self_attn.o_proj", nn.Linear(16, 32)),
        "o_proj.weight has 16 inputs, expected 32",
    ),
    "unknown layout": (
        lambda: tf.AutoModel.from_config(CTRL),
        "CTRLModel: its CTRLConfig has 4 heads.*BERT.*DistilBERT",
    ),
    "unknown beside known": (
        lambda: nn.ModuleDict({"text": build("bert"), "other": tf.AutoModel.from_config(CTRL)}),
        r"CTRLModel \(at other\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_attention_that_cannot_be_told(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    with pytest.raises(RoleError, match=message):
        find_attention(model)
    with pytest.raises(RoleError, match=f"{message}.*pass unknown='tensor'"):
        partition(model)
    bp = partition(model, unknown="tensor")  # every linear weight is one block, an embedding still goes by token
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    distinct = {id(table): len(table) for table in tables}
    assert bp.num_blocks == sum(distinct.get(id(p), 1) for p in model.parameters())


# Attentions of unknown layout that stay frozen


STRANGE: dict[str, Callable[[], nn.Module]] = {
    "ctrl": lambda: tf.CTRLForSequenceClassification(CTRL),
}
HEADS = {"ctrl": "classifier"}
MLPS = {"ctrl": ["ffn.0"]}
QUERIES = {"ctrl": ["Wq"]}


@pytest.mark.parametrize("unknown", ["error", "tensor"])
@pytest.mark.parametrize("family", STRANGE)
def test_a_frozen_attention_of_unknown_layout_leaves_the_rest_its_blocks(family: str, unknown: str) -> None:
    model = STRANGE[family]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(HEADS[family]))
    rows = sum(len(p) if p.ndim == 2 else 1 for p in model.parameters() if p.requires_grad)
    assert partition(model, unknown=unknown).num_blocks == rows
    adapted = lora(STRANGE[family](), MLPS[family])
    rows = sum(len(p) if p.ndim == 2 else 1 for p in adapted.parameters() if p.requires_grad)
    assert partition(adapted, unknown=unknown).num_blocks == rows
    for tuned in (lora(STRANGE[family](), QUERIES[family]), STRANGE[family]()):
        with pytest.raises(RoleError, match="no known attention layout was found"):
            partition(tuned)
    with pytest.raises(RoleError, match="no known attention layout was found"):
        partition(model, trainable_only=False)


def swin() -> Any:
    """Two stages, of 2 and 4 heads."""
    config = tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
    return tf.SwinForImageClassification(config)


def test_swin_has_its_heads_by_stage() -> None:
    assert [(a.num_heads, a.head_dim) for a in find_attention(swin())] == [(2, 8), (4, 8)]
    model = lora(swin(), ["q_proj", "v_proj"])
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    blocks = partition(model)
    found = [
        sum("q_proj.lora_B head" in name and f"layers.{stage}." in name for name in blocks.names) for stage in (0, 1)
    ]
    assert found == [2, 4]
    assert blocks.dim == sum(shape.numel() for shape in shapes.values())


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.raw = nn.Bilinear(3, 3, 2), nn.Parameter(torch.zeros(2, 5))


def test_weights_without_a_role_are_named_together() -> None:
    with pytest.raises(RoleError, match=r"raw \[2, 5\], bilinear.weight \[2, 3, 3\].*pass unknown='tensor'"):
        partition(Strange())
    assert partition(Strange(), unknown="tensor").sizes.tolist() == [10, 18, 2]
    with pytest.raises(RoleError, match="and 3 more: pass"):
        partition(nn.Sequential(*[Strange() for _ in range(4)]))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_stranger_among_the_projections(adapted: bool) -> None:
    model = build("llama")
    model.model.layers[1].self_attn.gate = nn.Linear(32, 6, bias=False)
    name, shape = ("gate.weight", [6, 32])
    if adapted:
        model, name, shape = lora(model, ["gate"]), "gate.lora_B.default.weight", [6, 4]
    with pytest.raises(RoleError, match=rf"self_attn\.{name} \[{shape[0]}, {shape[1]}\]"):
        partition(model)
    assert "unknown" in partition(model, unknown="tensor").table()
