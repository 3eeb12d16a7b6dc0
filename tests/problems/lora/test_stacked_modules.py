"""Each stand-in computes what every client's own layer computes, and is read like the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lora_problems import adapted
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from fedllm.common.errors import UserError
from fedllm.models.lora import lora_layers
from fedllm.problems.lora.dropout import Dropout
from fedllm.problems.lora.packing import Packed
from fedllm.problems.lora.pass_context import Pass, PassContext
from fedllm.problems.lora.stacked_modules import (
    CheckpointedBlock,
    CountedDropout,
    StackedLinear,
    StackedLora,
    StandIn,
    make_stand_ins,
    outermost_blocks,
)

CLIENTS = 3


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def lora_layer(layer: nn.Module) -> Any:
    """A PEFT layer of rank 2 and scale 1.5 over this one."""
    config = LoraConfig(
        r=2, lora_alpha=3, target_modules=["layer"], lora_dropout=0.25, fan_in_fan_out=isinstance(layer, Conv1D)
    )
    return inject_adapter_in_model(config, Holder(layer)).layer.eval()


def each_clients_own(layer: Any, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """What the PEFT layer computes with each client's adapters, one after the other. x [C * m, L, in]."""
    found = []
    for rows, a, b in zip(x.chunk(len(A)), A, B, strict=True):
        layer.lora_A["default"].weight.data.copy_(a)
        layer.lora_B["default"].weight.data.copy_(b)
        found.append(layer(rows))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_stacked_lora_is_each_clients_peft_layer(kind: str) -> None:
    layer = lora_layer(nn.Linear(6, 4) if kind == "Linear" else Conv1D(4, 6))
    context = PassContext()
    stacked = StackedLora(layer, context, "some.layer", number=0)
    A, B, x = normal(CLIENTS, 2, 6), normal(CLIENTS, 4, 2), normal(2 * CLIENTS, 5, 6)
    with context.run(Pass(dict(zip(stacked.names, (A, B), strict=True)))):
        found = stacked(x)
    assert stacked.names == ("some.layer.lora_A.default.weight", "some.layer.lora_B.default.weight")
    torch.testing.assert_close(found, each_clients_own(layer, x, A, B))


@pytest.mark.parametrize("counts", [[1, 3, 2], [2, 2, 2]])
def test_stacked_lora_of_packed_rows(counts: list[int]) -> None:
    """Clients whose rows differ in number, and clients with as many rows each."""
    layer, context = lora_layer(nn.Linear(6, 4)), PassContext()
    stacked = StackedLora(layer, context, "layer", number=0)
    A, B, x = normal(CLIENTS, 2, 6), normal(CLIENTS, 4, 2), normal(6, 5, 6)
    packed = Packed(
        {}, torch.zeros(6, 5), torch.zeros(6, 5), torch.zeros(6), [5 * count for count in counts], causal=False
    )
    with context.run(Pass(dict(zip(stacked.names, (A, B), strict=True)), packed=packed)):
        found = stacked(x)
    parts = zip(x.split(counts), A, B, strict=True)
    torch.testing.assert_close(
        found, torch.cat([each_clients_own(layer, rows, a[None], b[None]) for rows, a, b in parts])
    )


def test_only_the_adapters_input_is_dropped() -> None:
    layer, context = lora_layer(nn.Linear(6, 4)), PassContext()
    stacked = StackedLora(layer, context, "layer", number=0)
    A, B, x = normal(1, 2, 6), normal(1, 4, 2), normal(2, 5, 6)
    keys = torch.tensor([3, 4], dtype=torch.int32)
    with context.run(Pass(dict(zip(stacked.names, (A, B), strict=True)), Dropout(keys, layers=1))):
        found = stacked(x)
    dropped = Dropout(keys, layers=1)(x, 0.25, 0)
    torch.testing.assert_close(found, layer.base_layer(x) + 1.5 * dropped @ A[0].T @ B[0].T)


@pytest.mark.parametrize("counts", [None, [1, 3, 2], [2, 2, 2]])
@pytest.mark.parametrize("drops", [False, True])
def test_tokens_laid_end_to_end_are_computed_as_in_rows(counts: list[int] | None, drops: bool) -> None:
    """As OPT's MLP has them: one sample per row, packed rows that differ in number, and packed rows as many each."""
    layer, context = lora_layer(nn.Linear(6, 4)), PassContext()
    stacked = StackedLora(layer, context, "layer", number=0)
    A, B, x = normal(CLIENTS, 2, 6), normal(CLIENTS, 4, 2), normal(6, 5, 6)
    keys, packed, where = torch.arange(6, dtype=torch.int32), None, ()
    if counts is not None:
        sample, position = torch.arange(6)[:, None].expand(6, 5), torch.arange(5).expand(6, 5)
        packed, where = (
            Packed({}, sample, position, torch.zeros(6), [5 * count for count in counts], causal=False),
            (sample, position),
        )
    found = []
    for tokens in (x, x.flatten(0, 1)):
        dropout = Dropout(keys, 1, *where) if drops else None
        with context.run(Pass(dict(zip(stacked.names, (A, B), strict=True)), dropout, packed)):
            found.append(stacked(tokens))
    assert found[1].shape == (30, 4)
    assert torch.equal(found[0].flatten(0, 1), found[1])
    if drops:
        assert not torch.allclose(found[0].flatten(0, 1), each_clients_own(layer, x, A, B).flatten(0, 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2 * CLIENTS, 6), (2 * CLIENTS, 5, 6)])
def test_stacked_linear_is_each_clients_linear(bias: bool, shape: tuple[int, ...]) -> None:
    context = PassContext()
    stacked = StackedLinear(nn.Linear(6, 4, bias=bias), context, "head")
    W, b, x = normal(CLIENTS, 4, 6), normal(CLIENTS, 4), normal(*shape)
    with context.run(Pass(dict(zip(stacked.names, (W, b), strict=False)))):
        found = stacked(x)
    assert stacked.names == (["head.weight", "head.bias"] if bias else ["head.weight"])
    offsets = b if bias else [None] * CLIENTS
    expected = [F.linear(rows, w, offset) for rows, w, offset in zip(x.chunk(CLIENTS), W, offsets, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected))


def test_counted_dropout_draws_from_the_passs_keys_and_leaves_attention_alone() -> None:
    context = PassContext()
    stacked = CountedDropout(nn.Dropout(0.5), context, number=1)
    x, keys = torch.ones(2, 3, 8), torch.tensor([5, 6], dtype=torch.int32)
    assert stacked(x) is x, "between passes"
    with context.run(Pass(dropout=Dropout(keys, layers=2))):
        assert torch.equal(stacked(x), Dropout(keys, layers=2)(x, 0.5, 1))
        probabilities = torch.ones(2, 4, 3, 3)
        assert stacked(probabilities) is probabilities
        assert context.current.uses == {1: 1}


# -- what others read of a stand-in -----------------------------------------------------------------------------------


def test_a_stand_in_is_read_like_its_original() -> None:
    linear, dropout, layer = nn.Linear(6, 4), nn.Dropout(0.5), lora_layer(nn.Linear(6, 4))
    context = PassContext()
    stacked = StackedLinear(linear, context, "head")
    assert isinstance(stacked, nn.Linear)
    assert stacked.weight is linear.weight
    assert (stacked.bias is linear.bias, stacked.in_features, stacked.training) == (True, 6, True)
    counted = CountedDropout(dropout.eval(), context, 0)
    assert isinstance(counted, nn.Dropout)
    assert (counted.p, counted.training) == (0.5, False)
    lora = StackedLora(layer, context, "layer", 0)
    assert isinstance(lora, LoraLayer)
    assert lora.weight is layer.base_layer.weight
    assert lora.get_base_layer() is layer.base_layer
    assert lora.scaling is layer.scaling
    assert list(lora.state_dict()) == list(layer.state_dict())
    with pytest.raises(AttributeError, match="Linear' object has no attribute 'nothing'"):
        _ = stacked.nothing


def test_hooks_and_moves_reach_both() -> None:
    linear, context = nn.Linear(6, 4), PassContext()
    calls: list[str] = []
    linear.register_forward_pre_hook(lambda module, args: calls.append("before"))
    stacked = StackedLinear(linear, context, "head")
    stacked.register_forward_hook(lambda module, args, found: calls.append("after"))
    with context.run(Pass({"head.weight": normal(1, 4, 6), "head.bias": normal(1, 4)})):
        stacked(normal(2, 6))
    linear(normal(2, 6))
    assert calls == ["before", "after"] * 2
    stacked.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16
    stacked.to("meta")
    assert linear.weight.is_meta


class Layer(GradientCheckpointingLayer):
    """A block with a method and an attribute of its own, which models ask their blocks for."""

    kind = "full attention"

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.number = nn.Linear(4, 4), 7

    def norm(self) -> Tensor:
        return self.inner.weight.norm()

    def forward(self, x: Tensor, *, shift: Tensor) -> tuple[Tensor, None]:
        return self.inner(x).exp() + shift, None


def test_a_checkpointed_block_computes_again_what_it_computed() -> None:
    block, x, shift = Layer(), normal(2, 4).requires_grad_(), normal(2, 4)
    runs: list[int] = []
    block.inner.register_forward_hook(lambda *_: runs.append(1))
    stacked = CheckpointedBlock(block, PassContext())
    assert (stacked.kind, stacked.number, stacked.norm()) == (block.kind, block.number, block.norm())
    gradients = []
    for module in (block, stacked):
        found, nothing = module(x, shift=shift)
        assert nothing is None
        gradients.append(torch.autograd.grad(found.sum(), x)[0])
    assert torch.equal(*gradients)
    assert len(runs) == 1 + 2
    with torch.no_grad():
        stacked(x, shift=shift)
    assert len(runs) == 4


def test_a_block_inside_another_is_not_checkpointed_again() -> None:
    outer = Layer()
    outer.inner = Layer()
    assert outermost_blocks(nn.ModuleList([outer, outer, nn.Linear(1, 1)])) == [outer]


# -- which modules get one --------------------------------------------------------------------------------------------


def kinds(found: list[StandIn]) -> list[str]:
    return [type(stand_in).__name__ for stand_in in found]


def test_lora_head_and_dropout_layers_get_a_stand_in(tmp_path: Path) -> None:
    """Query and value of both blocks, the head's one layer, and every dropout layer outside the adapters."""
    model = adapted(tmp_path, "bert")
    trainable = [name for name, value in model.named_parameters() if value.requires_grad]
    found = make_stand_ins(model, trainable, PassContext())
    assert sorted(found.adapters) == sorted(name for name in trainable if ".lora_" in name)
    assert kinds(found.modules).count("StackedLora") == len(lora_layers(model)) == 4
    assert kinds(found.modules).count("StackedLinear") == 1
    dropouts = [
        module for name, module in model.named_modules() if isinstance(module, nn.Dropout) and "lora_" not in name
    ]
    assert kinds(found.modules).count("CountedDropout") == len(dropouts)
    numbers = [stand_in.number for stand_in in found.modules if isinstance(stand_in, StackedLora | CountedDropout)]
    assert numbers == list(range(found.dropouts)), "in the order of the model"


def test_a_trainable_parameter_elsewhere_is_refused(tmp_path: Path) -> None:
    model = adapted(tmp_path, "bert")
    norm = "base_model.model.bert.embeddings.LayerNorm.weight"
    with pytest.raises(UserError, match=rf"cannot train {norm} of several clients at once: expected .* in LoRA layers"):
        make_stand_ins(model, [norm], PassContext())
