"""Finds a model's task head and attention projections, and splits GPT-2's fused projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fedllm.blocks import Attention, RoleError, find_attention
from fedllm.common.errors import UserError

FUSED = ("query", "key", "value")


class SplitQKV(nn.Module):
    """GPT-2's fused projection Conv1D(h, 3h) as three Linear(h, h), so that LoRA can adapt query and value only.

    In y = x W + b, W is [h, 3h]; the Linear of a role has the weight W[:, role]^T. Outputs agree up to rounding.
    """

    def __init__(self, fused: Conv1D) -> None:
        super().__init__()
        weights, biases = fused.weight.detach().chunk(3, dim=1), fused.bias.detach().chunk(3)
        self.query, self.key, self.value = (_linear(w.T, b) for w, b in zip(weights, biases, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., 3h]: query, key and value side by side."""
        return torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A frozen Linear with these values. It is created on the meta device, which draws no random numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear


def find_head(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the task head: the children with parameters, other than the base model."""
    children = model.named_children()
    return tuple(n for n, child in children if n != model.base_model_prefix and any(True for _ in child.parameters()))


def attentions(model: nn.Module, name: str) -> list[Attention]:
    """`find_attention` for the model called `name`. Raises UserError if it finds no query and value projections."""
    try:
        found = find_attention(model)
    except RoleError as cause:
        raise UserError(f"model '{name}': {cause}") from cause
    if not found:
        raise UserError(f"model '{name}': {type(model).__name__} has no attention that LoRA could adapt")
    return found


def split_fused(model: nn.Module, name: str) -> list[Attention]:
    """Replaces every fused query/key/value projection by a SplitQKV, in place, and returns the model's attentions.

    Raises UserError for a fused projection that is not GPT-2's.
    """
    for attention in attentions(model, name):
        if attention.fused:
            layer = model.get_submodule(attention.query)
            if not isinstance(layer, Conv1D):
                kind = type(layer).__name__
                raise UserError(
                    f"model '{name}': {attention.query} is a fused {kind}, and only GPT-2's can be taken apart "
                    f"for query and value alone; lora.targets=[output] adapts the output projection"
                )
            model.set_submodule(attention.query, SplitQKV(layer))
    return attentions(model, name)
