"""The blocks of every attention layout against what the model computes: a head's block moves its own head alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from block_models import context
from transformers.models.auto import CONFIG_MAPPING

from fedllm.blocks import find_attention, partition

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 32,
         "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16}, "bert": {}, "bloom": {"n_head": 4}, "deberta": {},
    "deberta-v2": {"relative_attention": True},
    "distilbert": {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48}, "falcon": {"multi_query": False},
    "gemma2": {**GROUPED, "head_dim": 16}, "gpt2": {"n_inner": 48}, "gpt_neox": {}, "llama": GROUPED,
    "modernbert": {"local_attention": 8}, "modernbert-decoder": {"local_attention": 8}, "mpnet": {}, "mpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "persimmon": {}, "phi": GROUPED, "phi3": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_of_an_attention_moves_what_its_name_says(family: str) -> None:
    config = CONFIG_MAPPING[family](**SMALL | FAMILIES[family], initializer_range=0.2)
    torch.manual_seed(0)
    model: Any = tf.AutoModel.from_config(config).eval()
    (attention,) = find_attention(model)
    bp, output = partition(model), model.get_submodule(attention.output)
    width, group = attention.head_dim, attention.num_heads // attention.num_kv_heads
    parameters, before = dict(model.named_parameters()), context(model, output)
    heads = torch.arange(attention.num_heads * width) // width
    seen = 0
    for block, name in enumerate(bp.names):
        path, _, what = name.partition(".weight ")
        if path not in (attention.query, attention.key, attention.value) or not what:
            continue
        kind, unit = what.split()[-2], int(what.split()[-1])
        if kind == "head":
            of_query = "query" in what or (not attention.fused and path == attention.query)
            expected = heads == unit if of_query else heads // group == unit
        else:
            place = torch.arange(len(heads))
            expected = (heads // group == unit // width) & (place % width == unit % width)
        weight = parameters[f"{path}.weight"]
        coordinates = bp.expand(torch.eye(bp.num_blocks)[block])[bp.slices[f"{path}.weight"]].view_as(weight)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(coordinates * torch.randn(weight.shape))
        moved = (context(model, output) - before).abs().amax(dim=0) > 1e-6
        with torch.no_grad():
            weight.copy_(kept)
        assert torch.equal(moved, expected), name
        seen += 1
    assert seen == attention.num_heads + attention.num_kv_heads * (1 + width)
