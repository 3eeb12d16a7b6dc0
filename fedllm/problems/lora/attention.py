"""Attention without a value read back from the device for its mask, and on CPUs without slow kernels.

transformers reads every attention mask (`mask.all()`) to find out whether it can do without one. On a GPU, the host
then waits for all work before it, once per forward. Texts are padded on the right, so that the host knows the answer
without reading: under causal attention no text attends to its own padding, and elsewhere a mask is given only where
there is padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "fedllm_sdpa"
_LOW = (torch.bfloat16, torch.float16)


def set_attention(model: nn.Module, given: str, wanted: str) -> None:
    """Sets the attention of the transformers model in `model` to `wanted`, if it is `given`."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is not None and inner.config._attn_implementation == given:
        inner.set_attn_implementation(wanted)


def is_causal(model: nn.Module) -> bool:
    """Whether the model's tokens attend to earlier ones only."""
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """transformers' own mask for scaled_dot_product_attention, without padding where no text attends to it."""
    padding = None if allow_is_causal_skip else attention_mask
    mask: Tensor | None = sdpa_mask(
        attention_mask=padding,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and padding is None,
        **options,
    )
    return mask


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' own call of scaled_dot_product_attention; on a CPU in float32, also under autocast.

    There torch's backward pass is several times as slow in bfloat16 as in float32.
    """
    if value.device.type != "cpu" or value.dtype not in _LOW:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.float()
    with torch.autocast("cpu", enabled=False):
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return out.to(value.dtype), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
