"""The block partition: counts and means worked out by hand for each family, and its algebra for any model."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from block_models import adapt, build
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, FAMILIES
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto import CONFIG_MAPPING

from fedllm.blocks import BlockPartition, RoleError, find_attention, partition

HEADS, KV, HIDDEN, MLP, HEAD_DIM = 4, 2, 32, 48, 8


def flat(model: nn.Module, trainable: bool = False) -> torch.Tensor:
    chosen = [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad or not trainable]
    return torch.cat(chosen)


def block(model: nn.Module, trainable: bool, name: str, index: int) -> float:
    """The mean of the index-th block of the parameter `name`, in float64: means near zero leave float32 few digits."""
    model.double()
    blocks = partition(model, trainable_only=trainable)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), partition_counts(model, trainable).cumsum(0)])
    order = [n for n, p in model.named_parameters() if p.requires_grad or not trainable]
    return float(blocks.means(flat(model, trainable))[starts[order.index(name)] + index])


def partition_counts(model: nn.Module, trainable: bool) -> torch.Tensor:
    """Blocks of each parameter: those whose coordinates lie in its slice."""
    blocks = partition(model, trainable_only=trainable)
    owner = blocks.expand(torch.arange(blocks.num_blocks, dtype=torch.float64))
    return torch.tensor([len(owner[span].unique()) for span in blocks.slices.values()])


def layer_counts(family: str) -> int:
    """Blocks of one layer's full weights, by hand: heads for query and key, rows for the rest, one for each vector."""
    return {
        "bert": (HEADS + 1) * 2 + (HIDDEN + 1) * 2 + 2 + (MLP + 1) + (HIDDEN + 1) + 2,
        "roberta": (HEADS + 1) * 2 + (HIDDEN + 1) * 2 + 2 + (MLP + 1) + (HIDDEN + 1) + 2,
        "distilbert": (HEADS + 1) * 2 + (HIDDEN + 1) * 2 + 2 + (MLP + 1) + (HIDDEN + 1) + 2,
        "gpt2": 2 + (2 * HEADS + HIDDEN + 1) + (HIDDEN + 1) + 2 + (4 * HIDDEN + 1) + (HIDDEN + 1),
        "llama": HEADS + KV + KV * HEAD_DIM + HIDDEN + 2 * MLP + HIDDEN + 2,
        "qwen2": HEADS + KV + KV * HEAD_DIM + 3 + HIDDEN + 2 * MLP + HIDDEN + 2,
    }[family]


OUTSIDE = {  # embeddings by token or position, norms, pooler and head
    "bert": 32 + 64 + 2 + 2 + (HIDDEN + 1) + (2 + 1),
    "roberta": 32 + 64 + 2 + 2 + (HIDDEN + 1) + (2 + 1),
    "distilbert": 32 + 64 + 2 + (HIDDEN + 1) + (2 + 1),
    "gpt2": 32 + 64 + 2 + 2,
    "llama": 32 + 1 + 2,
    "qwen2": 32 + 1 + 2,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_weights_have_the_blocks_counted_by_hand(family: str) -> None:
    blocks = partition(build(family), trainable_only=False)
    assert blocks.num_blocks == 2 * layer_counts(family) + OUTSIDE[family]
    assert len(blocks.names) == blocks.num_blocks == len(set(blocks.names))
    assert int(blocks.sizes.sum()) == blocks.dim == len(flat(build(family)))


@pytest.mark.parametrize(
    ("family", "targets", "a_layer", "head"),
    [
        ("bert", ["query", "value"], (2 + HEADS) + (2 + HIDDEN), 2 + 1),
        ("roberta", ["query", "value"], (2 + HEADS) + (2 + HIDDEN), (HIDDEN + 1) + (2 + 1)),
        ("distilbert", ["q_lin", "k_lin", "v_lin"], 2 * (2 + HEADS) + (2 + HIDDEN), (HIDDEN + 1) + (2 + 1)),
        ("gpt2", ["c_attn"], 2 + 2 * HEADS + HIDDEN, 2),
        ("llama", ["q_proj", "k_proj", "v_proj"], (2 + HEADS) + (2 + KV) + (2 + KV * HEAD_DIM), 2),
        ("qwen2", ["q_proj", "o_proj"], (2 + HEADS) + (2 + HIDDEN), 2),
        ("bert", ["intermediate.dense"], 2 + MLP, 2 + 1),
        ("gpt2", ["c_fc", "mlp.c_proj"], (2 + 4 * HIDDEN) + (2 + HIDDEN), 2),
        ("llama", ["gate_proj", "up_proj", "down_proj"], 2 * (2 + MLP) + (2 + HIDDEN), 2),
        ("distilbert", ["lin1", "lin2"], (2 + MLP) + (2 + HIDDEN), (HIDDEN + 1) + (2 + 1)),
    ],
)
def test_lora_weights_have_the_blocks_counted_by_hand(family: str, targets: list[str], a_layer: int, head: int) -> None:
    model = adapt(build(family), *targets)
    assert partition(model).num_blocks == 2 * a_layer + head


def test_a_querys_head_and_a_values_row_under_lora() -> None:
    model = adapt(build("bert"), "query", "value")
    nn.init.normal_(model.base_model.model.bert.encoder.layer[1].attention.self.query.lora_B.default.weight)
    prefix = "base_model.model.bert.encoder.layer.1.attention.self"
    B = model.get_parameter(f"{prefix}.query.lora_B.default.weight")
    assert block(model, True, f"{prefix}.query.lora_B.default.weight", 1) == pytest.approx(
        float(B[8:16].detach().mean())
    )
    A = model.get_parameter(f"{prefix}.value.lora_A.default.weight")
    assert block(model, True, f"{prefix}.value.lora_A.default.weight", 1) == pytest.approx(float(A[1].detach().mean()))


def test_gpt2s_fused_transposed_projection_is_told_apart_first() -> None:
    model = build("gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    W = model.get_parameter(name)  # [in, 3 * out]
    assert block(model, False, name, 2) == pytest.approx(float(W.detach()[:, 16:24].mean()))  # query, head 2
    assert block(model, False, name, HEADS + 1) == pytest.approx(
        float(W.detach()[:, 32 + 8 : 32 + 16].mean())
    )  # key, head 1
    assert block(model, False, name, 2 * HEADS + 5) == pytest.approx(
        float(W.detach()[:, 64 + 5].mean())
    )  # value, neuron 5
    mlp = "transformer.h.1.mlp.c_fc.weight"
    assert block(model, False, mlp, 7) == pytest.approx(float(model.get_parameter(mlp).detach()[:, 7].mean()))


def test_grouped_query_attention_has_fewer_key_blocks() -> None:
    model = build("llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    W = model.get_parameter(name)  # [KV * HEAD_DIM, hidden]
    assert block(model, False, name, 1) == pytest.approx(float(W.detach()[8:16].mean()))
    (first, _) = find_attention(model)
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.fused) == (4, 2, 8, False)
    assert first.query == "model.layers.0.self_attn.q_proj"


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    config = CONFIG_MAPPING["llama"](vocab_size=32, head_dim=16, **CONFIGS["llama"])
    model = AutoModelForSequenceClassification.from_config(config)
    assert find_attention(model)[0].head_dim == 16
    assert int(partition_counts(model, False)[1]) == HEADS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["hessian", "tensor", "elementwise", "none"])
def test_algebra(family: str, scheme: str) -> None:
    """Sizes sum to d; means(expand(b)) == b; the weighted mean of means(v) is that of v; order is the flat one."""
    model = build(family)
    blocks = partition(model, scheme=scheme, trainable_only=False)
    v = torch.randn(2, 3, blocks.dim, dtype=torch.float64)
    b = torch.randn(2, 3, blocks.num_blocks, dtype=torch.float64)
    assert int(blocks.sizes.sum()) == blocks.dim
    torch.testing.assert_close(blocks.means(blocks.expand(b)), b, rtol=0, atol=1e-12)
    torch.testing.assert_close((blocks.means(v) * blocks.sizes).sum(-1) / blocks.dim, v.mean(-1))
    assert list(blocks.slices) == [name for name, _ in model.named_parameters()]
    owner = blocks.expand(torch.arange(blocks.num_blocks, dtype=torch.float64)).long()
    assert torch.equal(torch.bincount(owner), blocks.sizes)
    expected = torch.stack([v[..., owner == index].mean(-1) for index in (0, blocks.num_blocks - 1)], -1)
    torch.testing.assert_close(blocks.means(v)[..., [0, -1]], expected)


def test_tensor_scheme_is_one_block_a_tensor() -> None:
    model = build("bert")
    blocks = partition(model, scheme="tensor", trainable_only=False)
    expected = torch.stack([p.detach().mean() for p in model.parameters()])
    torch.testing.assert_close(blocks.means(flat(model)), expected, rtol=1e-5, atol=1e-7)
    assert partition(model, scheme="none", trainable_only=False).num_blocks == 1


@settings(max_examples=30, deadline=None)
@given(widths=st.lists(st.integers(1, 9), min_size=2, max_size=5), least=st.integers(1, 40))
def test_min_block_size_merges_neighbours_inside_a_tensor(widths: list[int], least: int) -> None:
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
    blocks = partition(model, min_block_size=least)
    assert blocks.num_blocks <= partition(model).num_blocks
    for (_, parameter), count in zip(model.named_parameters(), _counts_in(blocks), strict=True):
        sizes = blocks.sizes[count[0] : count[1]]
        assert int(sizes.sum()) == parameter.numel()
        assert len(sizes) == 1 or int(sizes.min()) >= least


def _counts_in(blocks: BlockPartition) -> list[tuple[int, int]]:
    """First and last block (exclusive) of each parameter."""
    ends, found, block = blocks.sizes.cumsum(0).tolist(), [], 0
    for span in blocks.slices.values():
        begin = block
        while block < blocks.num_blocks and ends[block] <= span.stop:
            block += 1
        found.append((begin, block))
    return found


def test_a_plain_torch_model_goes_by_rows_and_names_decide_nothing() -> None:
    model = nn.Sequential()
    model.add_module("query", nn.Linear(6, 4))
    model.add_module("table", nn.Embedding(5, 3))
    assert partition(model).num_blocks == (4 + 1) + 5


def test_multihead_attention_of_torch() -> None:
    model = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=12)
    attention = (2 + 2 + 8) + 1 + 8 + 1
    assert partition(model).num_blocks == attention + (12 + 1) + (8 + 1) + 4


def test_an_unknown_role_is_an_error_that_names_the_weight() -> None:
    model = nn.Sequential(nn.Bilinear(3, 2, 5), nn.Linear(4, 2))
    with pytest.raises(RoleError, match=r"0\.weight.*5, 3, 2"):
        partition(model)
    assert partition(model, unknown="tensor").num_blocks == 1 + 1 + 2 + 1


def test_wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="scheme: found 'rows'"):
        partition(model, scheme="rows")
    with pytest.raises(ValueError, match="nothing to partition"):
        partition(model.requires_grad_(False))
    with pytest.raises(ValueError, match="last dimension must be 6"):
        partition(nn.Linear(2, 2)).means(torch.zeros(5))


def test_table_adds_up() -> None:
    blocks = partition(adapt(build("bert"), "query", "value"))
    last = blocks.table().splitlines()[-1].split()
    assert last[2] == f"{blocks.dim:,}"
    assert last[3] == f"{blocks.num_blocks:,}"
    assert last[4] == f"{4 * (blocks.dim - blocks.num_blocks):,}"


def test_importing_it_needs_torch_alone() -> None:
    code = (
        "import sys; from fedllm.blocks import partition, BlockPartition; "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "assert not loaded & {'transformers', 'peft', 'datasets', 'accelerate', 'yaml', 'rich'}, loaded; "
        "ours = [name for name in sys.modules if name.startswith('fedllm')]; "
        "assert all(name == 'fedllm' or name.startswith('fedllm.blocks') for name in ours), ours"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
