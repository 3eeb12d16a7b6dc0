"""Finds a model's head and attention projections, and splits GPT-2's fused projection."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fedllm.blocks import Attention, RoleError, find_attention
from fedllm.blocks.attention import features
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

    def fused(self) -> Conv1D:
        """The same projection as the Conv1D(h, 3h) that it was made of."""
        parts = [self.query, self.key, self.value]
        height, width = parts[0].weight.shape
        with torch.device("meta"):  # draws no random numbers
            made = Conv1D(3 * height, width)  # type: ignore[no-untyped-call]
        made.weight = nn.Parameter(torch.cat([part.weight.T for part in parts], dim=1), requires_grad=False)
        made.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
        return made


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A frozen Linear with these values. It is created on the meta device, which draws no random numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear


def find_head(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the task head, which is trained: () for a language model, whose output embedding stays frozen."""
    return () if is_language_model(model) else output_modules(model)


def is_language_model(model: PreTrainedModel) -> bool:
    """Whether the model gives a value for each word of its vocabulary."""
    headless = not model.base_model_prefix or not hasattr(model, model.base_model_prefix)
    return not headless and model.get_output_embeddings() is not None  # type: ignore[no-untyped-call]


def output_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the modules that make the outputs: the children with parameters, other than the base model."""
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


def split_fused(model: nn.Module, name: str, roles: Collection[str] = FUSED) -> list[Attention]:
    """Replaces every fused query/key/value projection of GPT-2 by a SplitQKV, in place; returns the model's attentions.

    roles: those that are to be adapted. If they are all three, another fused linear layer stays whole.
    Raises UserError if they are some of such a layer's, and for a fused projection that is no linear layer.
    """
    for attention in attentions(model, name):
        if attention.fused:
            layer = linear_projection(model, name, attention)
            if isinstance(layer, Conv1D):
                model.set_submodule(attention.query, SplitQKV(layer))
            elif set(roles) != set(FUSED):
                raise UserError(
                    f"model '{name}': {attention.query} is a fused {type(layer).__name__}, and only GPT-2's can be "
                    f"taken apart for {' and '.join(roles)} alone; lora.targets=[{', '.join(FUSED)}] adapts it whole, "
                    f"lora.targets=[output] the output projection"
                )
    return attentions(model, name)


def linear_projection(model: nn.Module, name: str, attention: Attention) -> nn.Module:
    """The layer of the query. Raises UserError if it is not linear, as that of a torch.nn.MultiheadAttention."""
    layer = model.get_submodule(attention.query)
    if features(layer) is None:
        raise UserError(
            f"model '{name}': {attention.query} is a {type(layer).__name__}, which has no linear layer of query, key "
            f"and value that LoRA could adapt"
        )
    return layer
