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

from fedllm.problems.lora.sample_attention import SampleGroups
from fedllm.problems.lora.short_attention import SHORT, short_attention

NAME = "fedllm_sdpa"
_LOW = (torch.bfloat16, torch.float16)
_MORE = ("position_bias", "softcap", "cache")  # options that short_attention does not have


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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    groups: SampleGroups | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [R, L, H, h] of query [R, H, L, h] and key, value [R, G, L, h], and no weights.

    groups: the samples of one row, each of which attends to itself; there is no mask then.
    """
    if groups is None:
        return _attend(module, query, key, value, attention_mask, options), None
    options["is_causal"] = groups.causal
    return groups.attention(query, key, value, lambda q, k, v, mask: _attend(module, q, k, v, mask, options)), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """transformers' own call of scaled_dot_product_attention; on a CPU in float32, also under autocast, or without it.

    There torch's backward pass is several times as slow in bfloat16 as in float32, and short rows need no kernel.
    """
    if value.device.type != "cpu" or value.dtype not in _LOW:
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    with torch.autocast("cpu", enabled=False):
        if _is_short(query, key, value, options):
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            return short_attention(query, key, value, mask, causal, scale).transpose(1, 2).contiguous()
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        out, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return out.to(value.dtype)


def _is_short(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether short_attention computes what is asked for: whole short rows, and no option that it does not know."""
    same = query.shape[2:] == key.shape[2:] == value.shape[2:] and query.dtype == key.dtype == value.dtype
    plain = not options.get("dropout") and all(options.get(name) is None for name in _MORE)
    return same and plain and query.shape[2] <= SHORT


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
