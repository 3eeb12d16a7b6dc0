"""Which layers lora.targets names, in every family; the papers' share of trained weights; roles that a model lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from repository import REPO
from torch import nn
from transformers.models.auto import CONFIG_MAPPING

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.models.lora_targets import find_targets
from fedllm.models.settings import ROLES, LoraSettings

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}
RELATIVE = {**SMALL, "relative_attention": True, "pos_att_type": "p2c|c2p", "max_relative_positions": 8}
T5 = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}

BERT = (["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"],
        {"mlp_in": ["intermediate.dense"], "mlp_out": ["output.dense"]})  # fmt: skip
LLAMA = (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
         {"mlp_in": ["mlp.up_proj"], "mlp_gate": ["mlp.gate_proj"], "mlp_out": ["mlp.down_proj"]})  # fmt: skip
OPT = ([f"self_attn.{letter}_proj" for letter in "qkv"] + ["self_attn.out_proj"],
       {"mlp_in": ["fc1"], "mlp_out": ["fc2"]})  # fmt: skip
VIT = ([f"attention.{letter}_proj" for letter in "qkvo"], {"mlp_in": ["mlp.fc1"], "mlp_out": ["mlp.fc2"]})

# family: config; where its blocks are; in a block, the layers of the attention as they are stored, and of the MLP
FAMILIES: dict[str, tuple[dict[str, Any], str, tuple[list[str], dict[str, list[str]]]]] = {
    "bert": (SMALL, "bert.encoder.layer.0", BERT),
    "roberta": (SMALL, "roberta.encoder.layer.0", BERT),
    "electra": ({**SMALL, "embedding_size": 16}, "electra.encoder.layer.0", BERT),
    "deberta-v2": (SMALL, "deberta.encoder.layer.0", (
        [f"attention.self.{role}_proj" for role in ("query", "key", "value")] + ["attention.output.dense"], BERT[1],
    )),
    "deberta": (RELATIVE, "deberta.encoder.layer.0",
                (["attention.self.in_proj", "attention.output.dense"], BERT[1])),
    "distilbert": ({"vocab_size": 32, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
                   "distilbert.transformer.layer.0",
                   ([f"attention.{letter}_lin" for letter in "qkv"] + ["attention.out_lin"],
                    {"mlp_in": ["ffn.lin1"], "mlp_out": ["ffn.lin2"]})),
    "albert": ({**SMALL, "embedding_size": 16}, "albert.encoder.albert_layer_groups.0.albert_layers.0",
               ([f"attention.{role}" for role in ("query", "key", "value", "dense")],
                {"mlp_in": ["ffn"], "mlp_out": ["ffn_output"]})),
    "modernbert": ({**SMALL, "cls_token_id": 0, "sep_token_id": 2}, "model.layers.0",
                   (["attn.Wqkv", "attn.Wo"],
                    {"mlp_in": ["mlp.Wi"], "mlp_gate": ["mlp.Wi"], "mlp_out": ["mlp.Wo"]})),
    "gpt2": (GPT2, "transformer.h.0",
             (["attn.c_attn", "attn.c_proj"], {"mlp_in": ["mlp.c_fc"], "mlp_out": ["mlp.c_proj"]})),
    "llama": (GQA, "model.layers.0", LLAMA),
    "mistral": (GQA, "model.layers.0", LLAMA),
    "qwen2": (GQA, "model.layers.0", LLAMA),
    "gemma": ({**GQA, "head_dim": 8}, "model.layers.0", LLAMA),
    "smollm3": (GQA, "model.layers.0", LLAMA),
    "nemotron": (GQA, "model.layers.0", (LLAMA[0], {"mlp_in": ["mlp.up_proj"], "mlp_out": ["mlp.down_proj"]})),
    "starcoder2": (GQA, "model.layers.0", (LLAMA[0], {"mlp_in": ["mlp.c_fc"], "mlp_out": ["mlp.c_proj"]})),
    "phi": (SMALL, "model.layers.0", (
        [f"self_attn.{letter}_proj" for letter in "qkv"] + ["self_attn.dense"], VIT[1],
    )),
    "phi3": (GQA, "model.layers.0",
             (["self_attn.qkv_proj", "self_attn.o_proj"],
              {"mlp_in": ["mlp.gate_up_proj"], "mlp_gate": ["mlp.gate_up_proj"], "mlp_out": ["mlp.down_proj"]})),
    "gpt_neox": (SMALL, "gpt_neox.layers.0",
                 (["attention.query_key_value", "attention.dense"],
                  {"mlp_in": ["mlp.dense_h_to_4h"], "mlp_out": ["mlp.dense_4h_to_h"]})),
    "gptj": ({**GPT2, "rotary_dim": 4}, "transformer.h.0",
             ([f"attn.{letter}_proj" for letter in "qkv"] + ["attn.out_proj"],
              {"mlp_in": ["mlp.fc_in"], "mlp_out": ["mlp.fc_out"]})),
    "opt": ({**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, "model.decoder.layers.0", OPT),
    "mpt": ({"vocab_size": 32, "d_model": 32, "n_layers": 1, "n_heads": 4}, "transformer.blocks.0",
            (["attn.Wqkv", "attn.out_proj"], {"mlp_in": ["ffn.up_proj"], "mlp_out": ["ffn.down_proj"]})),
    "vit": (IMAGE, "vit.layers.0", VIT),
    "swin": ({"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4},
             "swin.encoder.layers.0.blocks.0", VIT),
}  # fmt: skip
FUSED = [family for family, (_, _, (attention, _)) in FAMILIES.items() if len(attention) == 2]
GATED = [family for family, (_, _, (_, mlp)) in FAMILIES.items() if "mlp_gate" in mlp]


def build(family: str) -> Any:
    """A classifier with one block, on the meta device."""
    config = CONFIG_MAPPING[family](**FAMILIES[family][0])
    auto = tf.AutoModelForImageClassification if family in ("vit", "swin") else tf.AutoModelForSequenceClassification
    with torch.device("meta"):
        return auto.from_config(config)


def targets(family: str, *roles: str) -> list[str]:
    """The layers found, sorted, by their paths in the block."""
    block = FAMILIES[family][1]
    found = find_targets(build(family), family, LoraSettings(targets=list(roles)).targets)
    assert all(path.startswith(f"{block}.") for path in found)
    assert len(set(found)) == len(found)
    return sorted(path.removeprefix(f"{block}.") for path in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mlps_roles(family: str) -> None:
    _, _, (_, mlp) = FAMILIES[family]
    assert targets(family, "mlp") == sorted({path for paths in mlp.values() for path in paths})
    assert targets(family, "mlp_out") == mlp["mlp_out"]
    if mlp.get("mlp_gate") == mlp["mlp_in"]:
        assert targets(family, "mlp_in", "mlp_gate") == mlp["mlp_in"]
        for part in ("mlp_in", "mlp_gate"):
            with pytest.raises(UserError, match=rf"{mlp['mlp_in'][0]} is one layer for mlp_in and mlp_gate.*name both"):
                targets(family, part)
    else:
        assert targets(family, "mlp_in") == mlp["mlp_in"]
        for gate in mlp.get("mlp_gate", ()):
            assert targets(family, "mlp_gate") == [gate]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_every_layer_of_a_block_as_it_is_stored(family: str) -> None:
    _, _, (attention, mlp) = FAMILIES[family]
    assert targets(family, "all-linear") == sorted({*attention, *(path for paths in mlp.values() for path in paths)})


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_pefts_own_without_poolers_and_projected_embeddings(family: str) -> None:
    """PEFT takes every linear layer but the last; DeBERTa's positions are the only ones in a block that we leave."""
    _, block, _ = FAMILIES[family]
    found = set(find_targets(build(family), family, ["all-linear"]))
    peft = get_peft_model(build(family), LoraConfig(r=2, target_modules="all-linear"))
    theirs = {name for name in peft.targeted_module_names if name.startswith(f"{block}.") and "pos_" not in name}
    assert found == theirs


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_projection_is_a_target_if_all_its_roles_are(family: str) -> None:
    _, _, (attention, mlp) = FAMILIES[family]
    fused, output = attention
    whole = [f"{fused}.{role}" for role in ("key", "query", "value")] if family == "gpt2" else [fused]
    assert targets(family, "query", "key", "value") == whole
    assert targets(family, "value", "key", "query", "output", "mlp") == sorted(
        {*whole, output, *(path for paths in mlp.values() for path in paths)}
    )
    if family != "gpt2":
        message = rf"{fused} is a fused Linear.*taken apart for query and value alone.*\[query, key, value\] adapts it"
        with pytest.raises(UserError, match=message):
            targets(family, "query", "value")


def test_gpt2_is_split_only_for_its_query_key_or_value() -> None:
    for roles in (["mlp"], ["output", "mlp_in"], ["all-linear"]):
        model = build("gpt2")
        find_targets(model, "gpt2", roles)
        assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    model = build("gpt2")
    assert find_targets(model, "gpt2", ["key"]) == ["transformer.h.0.attn.c_attn.key"]


def test_encoder_and_decoder() -> None:
    """T5's first version without a gate and its second with one; XLM, whose attentions and MLPs are in two lists."""
    with torch.device("meta"):
        plain, gated = (tf.T5Model(tf.T5Config(**T5, feed_forward_proj=kind)) for kind in ("relu", "gated-gelu"))
        xlm = tf.XLMModel(tf.XLMConfig(vocab_size=32, emb_dim=32, n_layers=1, n_heads=4))
    dense = ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.0.layer.2.DenseReluDense"]
    assert find_targets(plain, "t5", ["mlp"]) == [f"{path}.{child}" for path in dense for child in ("wi", "wo")]
    assert find_targets(gated, "t5", ["mlp_in", "mlp_gate"]) == [f"{p}.{c}" for p in dense for c in ("wi_1", "wi_0")]
    assert len(find_targets(gated, "t5", ["all-linear"])) == 3 * 4 + 2 * 3
    assert find_targets(xlm, "xlm", ["mlp"]) == ["ffns.0.lin1", "ffns.0.lin2"]
    assert len(find_targets(xlm, "xlm", ["all-linear"])) == 4 + 2


# -- the papers' share ------------------------------------------------------------------------------------------------


def lora_weights(model: Any, lora: LoraSettings) -> int:
    """rank * (inputs + outputs) summed over the layers that get LoRA."""
    sizes = [model.get_submodule(path).weight.shape for path in find_targets(model, "gpt2", lora.targets)]
    return sum(lora.rank * sum(size) for size in sizes)


def test_the_papers_share_of_gpt2s_weights() -> None:
    """1.9% in both papers: rank 64 on query and value, or 16 on the four linear layers of a block; both are 2,359,296.

    Rank 16 on query, key and value one by one, beside the other three, is 2.1%.
    """
    with torch.device("meta"):
        models = [tf.GPT2Model(tf.GPT2Config()) for _ in range(4)]
    everything = sum(value.numel() for value in models[0].parameters())
    assert everything == 124_439_808
    per_block = {
        "query and value": 64 * 2 * (768 + 768),
        "four layers": 16 * ((768 + 3 * 768) + (768 + 768) + 2 * (768 + 4 * 768)),
        "six maps": 16 * (4 * (768 + 768) + 2 * (768 + 4 * 768)),
    }
    counts = [
        lora_weights(models[0], LoraSettings(rank=64)),
        lora_weights(models[1], LoraSettings(rank=16, targets="all-linear")),
        lora_weights(models[2], LoraSettings(rank=16, targets=["query", "key", "value", "output", "mlp"])),
        lora_weights(models[3], LoraSettings(rank=16)),
    ]
    assert counts == [*(12 * count for count in per_block.values()), 12 * 16 * 2 * (768 + 768)]
    shares = [f"{100 * count / everything:.1f}%" for count in counts]
    assert shares == ["1.9%", "1.9%", "2.1%", "0.5%"]
    assert counts[0] == counts[1] == 2_359_296


def test_the_gpt2_recipes_have_the_papers_share() -> None:
    recipes = sorted({*(REPO / "recipes").glob("*_gpt2.yaml")} - {REPO / "recipes" / "shakespeare_gpt2.yaml"})
    assert len(recipes) == 4
    for recipe in recipes:
        with torch.device("meta"):
            model = tf.GPT2Model(tf.GPT2Config())
        assert lora_weights(model, load_recipe(recipe).lora) == 2_359_296, recipe


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["query", "quary"], "targets: found unknown quary, expected some of: query, key, value, output, mlp_in"),
        ([], "targets: found no role"),
        (["all-linear", "query"], "targets: found all-linear beside query, expected it alone"),
    ],
)
def test_roles_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LoraSettings(targets=given)


def test_a_text_is_a_list_of_one() -> None:
    for role in ROLES:
        assert LoraSettings(targets=role) == LoraSettings(targets=[role])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in GATED])
def test_a_role_that_the_model_does_not_have_is_named_beside_those_that_it_has(family: str) -> None:
    message = rf"found mlp_gate, but model '{family}' \(\w+\) has none; it has query, key, value, output, mlp_in, mlp_o"
    with pytest.raises(UserError, match=message):
        targets(family, "query", "mlp_gate")


def test_nothing_is_split_for_roles_that_cannot_be_had() -> None:
    model = build("gpt2")
    with pytest.raises(UserError, match="mlp_gate"):
        find_targets(model, "gpt2", ["query", "mlp_gate"])
    assert type(model.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


@pytest.mark.parametrize("roles", [["mlp"], ["mlp_in"], ["all-linear"]])
@pytest.mark.parametrize(
    ("family", "shape"), [("mixtral", r"gate_up_proj \[4, 96, 32\]"), ("gpt_oss", r"gate_up_proj \[4, 32, 96\]")]
)
def test_experts_that_are_no_layers(family: str, shape: str, roles: list[str]) -> None:
    config = CONFIG_MAPPING[family](**GQA, num_local_experts=4, head_dim=8)
    with torch.device("meta"):
        model = tf.AutoModelForSequenceClassification.from_config(config)
    message = rf"model 'moe': model\.layers\.0\.mlp\.experts \(\w+Experts\).*{shape}.*\[query, key, value, output\]"
    with pytest.raises(UserError, match=message):
        find_targets(model, "moe", roles)
    assert len(find_targets(model, "moe", ["query", "value"])) == 2


def test_an_mlp_of_unknown_layout() -> None:
    """Its layers have no roles of their own; all-linear takes them."""
    model = build("llama")
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    message = (
        r"model\.layers\.0 has no MLP of a known layout.*mlp\.0, model\.layers\.0\.mlp\.2;.*all-linear adapts them"
    )
    with pytest.raises(UserError, match=message):
        find_targets(model, "llama", ["mlp_in"])
    found = find_targets(model, "llama", ["all-linear"])
    assert [path for path in found if "mlp" in path] == ["model.layers.0.mlp.0", "model.layers.0.mlp.2"]


def test_an_mlp_whose_layers_do_not_fit_together() -> None:
    for change, message in (
        (nn.Linear(32, 40), r"mlp\.up_proj has 40 outputs, expected 48 for the 48 inputs of .*down_proj"),
        (nn.Identity(), r"mlp\.up_proj should be a linear layer of an MLP, found Identity"),
    ):
        model = build("llama")
        model.model.layers[0].mlp.up_proj = change
        with pytest.raises(UserError, match=message):
            find_targets(model, "llama", ["mlp"])


def test_attention_without_an_mlp() -> None:
    model = build("bert")
    model.bert.encoder.layer[0].intermediate = nn.Identity()
    model.bert.encoder.layer[0].output = nn.Identity()
    with pytest.raises(UserError, match="BertForSequenceClassification has no MLP that LoRA could adapt"):
        find_targets(model, "bert", ["mlp"])


class Own(nn.Module):
    """An attention of torch's own, whose query, key and value are no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=12)])


@pytest.mark.parametrize("roles", [["query", "key", "value"], ["query"], ["all-linear"]])
def test_torchs_own_attention(roles: list[str]) -> None:
    with pytest.raises(UserError, match=r"blocks\.0\.self_attn is a MultiheadAttention, which has no linear layer"):
        find_targets(Own(), "own", roles)
