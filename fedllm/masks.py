"""Attention that never asks the device whether there is padding.

transformers looks at every attention mask to see whether it can do without one (`mask.all()`), which makes a GPU's host
wait for all the work before it, once a forward. Texts are padded on the right, so the answer is known on the host:
under causal attention no text sees its own padding, and elsewhere a mask is given only where there is some.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "fedllm_sdpa"


def set_attention(model: nn.Module, given: str, wanted: str) -> None:
    """Sets the attention of the transformers model in `model` to `wanted`, if it is `given`."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is not None and inner.config._attn_implementation == given:
        inner.set_attn_implementation(wanted)


def is_causal(model: nn.Module) -> bool:
    """Whether the model's tokens see only those before them."""
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """transformers' own mask for scaled_dot_product_attention, without padding where that cannot be seen."""
    padding = None if allow_is_causal_skip else attention_mask
    mask: Tensor | None = sdpa_mask(
        attention_mask=padding,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and padding is None,
        **options,
    )
    return mask


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, _mask)
