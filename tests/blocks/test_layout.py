"""The algebra of a block partition on random models, and its edges: merging, rounding, strides, devices, lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector
from transformers.pytorch_utils import Conv1D

from fedllm.blocks import BlockPartition, partition
from fedllm.blocks.layout import Run, Tile

SCHEMES = st.sampled_from(["hessian", "tensor", "elementwise", "none"])
BATCHES = st.sampled_from([(), (3,), (2, 0), (2, 2)])


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Linear, transposed, embedding, attention and vector parameters of random sizes, some of them frozen."""
    size = st.integers(1, 6)
    makers = {
        "linear": lambda: nn.Linear(draw(size), draw(size)),
        "embedding": lambda: nn.Embedding(draw(size), draw(size)),
        "norm": lambda: nn.LayerNorm(draw(size)),
        "conv1d": lambda: Conv1D(draw(size), draw(size)),
        "attention": lambda: nn.MultiheadAttention(draw(st.sampled_from([2, 4, 8])), 2),
    }
    kinds = draw(st.lists(st.sampled_from(sorted(makers)), min_size=1, max_size=5))
    model = nn.Sequential(*(makers[kind]() for kind in kinds))
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad = draw(st.integers(0, 3)) > 0
    return model


def block_index(bp: BlockPartition) -> torch.Tensor:
    """[d]: the block number of every coordinate."""
    return bp.expand(torch.arange(bp.num_blocks))


@settings(deadline=None, max_examples=150)
@given(
    model=models(),
    scheme=SCHEMES,
    minimum=st.sampled_from([None, 1, 2, 5, 13, 1000]),
    trainable_only=st.booleans(),
    batch=BATCHES,
)
@pytest.mark.slow
def test_means_and_expand_agree_with_plain_loops(
    model: nn.Module, scheme: str, minimum: int | None, trainable_only: bool, batch: tuple[int, ...]
) -> None:
    bp = partition(model, scheme=scheme, min_block_size=minimum, trainable_only=trainable_only)
    v = torch.randn(*batch, bp.dim, dtype=torch.float64)
    b = torch.randn(*batch, bp.num_blocks, dtype=torch.float64)
    means, flat, index = bp.means(v), bp.expand(b), block_index(bp)
    assert int(bp.sizes.sum()) == bp.dim
    torch.testing.assert_close(bp.means(flat), b, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close((means * bp.sizes).sum(-1) / bp.dim, v.mean(-1), rtol=1e-12, atol=1e-13)
    for block in range(bp.num_blocks):
        mine = index == block
        assert int(mine.sum()) == bp.sizes[block]
        torch.testing.assert_close(means[..., block], v[..., mine].mean(-1), rtol=1e-12, atol=1e-13)
        assert (flat[..., mine] == b[..., block, None]).all()
    assert len(bp.names) == len(set(bp.names)) == bp.num_blocks


@settings(deadline=None, max_examples=50)
@given(model=models(), scheme=SCHEMES, trainable_only=st.booleans())
def test_order_is_that_of_the_flat_vector(model: nn.Module, scheme: str, trainable_only: bool) -> None:
    bp = partition(model, scheme=scheme, trainable_only=trainable_only)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad or not trainable_only}
    x = parameters_to_vector(parameters.values())
    assert list(bp.slices) == list(parameters)
    assert bp.dim == x.numel()
    for name, parameter in parameters.items():
        assert torch.equal(x[bp.slices[name]], parameter.flatten())


@settings(deadline=None, max_examples=100)
@given(model=models(), scheme=st.sampled_from(["hessian", "elementwise"]), minimum=st.integers(1, 60))
def test_merging_cuts_no_block_and_leaves_no_tensor(model: nn.Module, scheme: str, minimum: int) -> None:
    fine, coarse = partition(model, scheme=scheme), partition(model, scheme=scheme, min_block_size=minimum)
    old, new = block_index(fine), block_index(coarse)
    used: set[int] = set()
    for where in coarse.slices.values():
        blocks = set(new[where].tolist())
        assert not blocks & used
        assert min(coarse.sizes[list(blocks)]) >= min(minimum, where.stop - where.start)
        used |= blocks
    merged_into = [new[old == block].unique().tolist() for block in range(fine.num_blocks)]
    assert {len(targets) for targets in merged_into} == {1}
    assert merged_into == sorted(merged_into)


def test_merging_by_hand() -> None:
    """Rows of 4 merged to at least 12: rows 0-2, 3-5 and, with what is left over, 6-9. The bias, 10, stays whole."""
    bp = partition(nn.Linear(4, 10), min_block_size=12)
    assert bp.sizes.tolist() == [12, 12, 16, 10]
    assert bp.names == ["weight rows 0-2", "weight rows 3-5", "weight rows 6-9", "bias"]


def test_merging_keeps_the_roles_of_a_fused_weight_apart() -> None:
    """Heads of 32, value rows of 8, at least 40: two heads each of query and key; five value rows, of 8 left over 3."""
    model = nn.MultiheadAttention(8, 2, bias=False)
    bp = partition(model, min_block_size=40)
    fused = [name.removeprefix("in_proj_weight ") for name in bp.names if name.startswith("in_proj")]
    assert fused == ["query heads 0-1", "key heads 0-1", "value rows 0-7"]
    assert bp.sizes[:3].tolist() == [64, 64, 64]
    assert partition(model, min_block_size=65).names[0] == "in_proj_weight"


def test_merging_keeps_the_numbers_of_a_run_that_begins_later() -> None:
    rows = Tile("w", "linear", (Run("row", 4, 10), Run("row", 5, 10, first=4))).merged(20)
    assert BlockPartition((rows,)).names == ["w rows 0-1", "w rows 2-3", "w rows 4-5", "w rows 6-8"]


def test_without_a_model() -> None:
    v = torch.rand(2, 5)
    every, one = BlockPartition.elementwise(5), BlockPartition.single(5)
    assert (every.num_blocks, every.sizes.tolist(), every.names[4]) == (5, [1] * 5, "coordinate 4")
    assert torch.equal(every.means(v), v)
    assert torch.equal(every.expand(v), v)
    assert (one.num_blocks, one.sizes.tolist()) == (1, [5])
    torch.testing.assert_close(one.means(v), v.mean(-1, keepdim=True))
    assert torch.equal(one.expand(torch.tensor([3.0])), torch.full((5,), 3.0))


@pytest.mark.parametrize("make", [lambda: nn.Linear(500, 400), lambda: Conv1D(400, 500), lambda: nn.Embedding(9, 9000)])
@pytest.mark.parametrize("scheme", ["hessian", "tensor", "none"])
def test_float32_means_round_as_well_as_plain_means(make: type[nn.Module], scheme: str) -> None:
    bp = partition(make(), scheme=scheme)
    v = torch.rand(3, bp.dim, generator=torch.Generator().manual_seed(0))
    assert bp.means(v).dtype == torch.float32
    torch.testing.assert_close(bp.means(v), bp.means(v.double()).float(), rtol=5e-7, atol=0)


def test_no_gradient_and_any_strides() -> None:
    bp = partition(nn.Linear(3, 4))
    v = torch.rand(bp.dim, 2, requires_grad=True)
    means = bp.means(v.T)
    assert not means.requires_grad
    torch.testing.assert_close(means, bp.means(v.detach().T.contiguous()))
    assert not bp.expand(torch.rand(bp.num_blocks, requires_grad=True)).requires_grad


def test_to_moves_the_sizes() -> None:
    bp = partition(nn.Linear(3, 4))
    assert bp.sizes.device.type == "cpu"
    assert bp.to("meta").sizes.device.type == "meta"
    assert bp.to("meta").slices == bp.slices
    v = torch.empty(2, bp.dim, device="meta")  # means and expand follow their argument, wherever the sizes are
    assert bp.expand(bp.means(v)).device.type == "meta"


@pytest.mark.parametrize("method", ["means", "expand"])
@pytest.mark.parametrize("shape", [(), (7,), (16, 2)])
def test_a_wrong_length_is_refused(method: str, shape: tuple[int, ...]) -> None:
    bp = partition(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=rf"{method}: the last dimension must be (16|5), found shape \("):
        getattr(bp, method)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "hesian"}, "scheme: found 'hesian', expected one of hessian"),
        ({"unknown": "row"}, "unknown: found 'row', expected error or tensor"),
        ({"min_block_size": 0}, "min_block_size: found 0"),
        ({"min_block_size": 2.5}, "min_block_size: found 2.5, expected a whole number"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(nn.Linear(2, 2), **arguments)  # type: ignore[arg-type]


def test_empty_tensors_have_no_blocks() -> None:
    bp = partition(nn.ModuleList([nn.Linear(0, 3), nn.Linear(2, 1)]))
    assert bp.names == ["0.bias", "1.weight row 0", "1.bias"]
    assert bp.slices["0.weight"] == slice(0, 0)


def test_table_by_role() -> None:
    table = partition(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 300))).table().splitlines()
    assert table[0].split() == ["role", "tensors", "coordinates", "blocks", "bytes", "saved"]
    assert table[2].split() == ["embedding", "1", "20", "5", "60"]
    assert table[3].split() == ["linear", "1", "1,200", "300", "3,600"]
    assert table[4].split() == ["vector", "1", "300", "1", "1,196"]
    assert table[-1].split() == ["total", "3", "1,520", "306", "4,856"]
    assert len({len(line) for line in table}) == 1
