"""Attention of stacked models: transformers' own, and in float32 on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from fedllm.problems.lora.attention import NAME


def attended(dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """Output [2, L, heads, h] and gradients of the query, key and value [2, heads, L, h], whose values are bfloat16."""
    draw = torch.Generator().manual_seed(0)
    query, key, value, g = (torch.randn(2, 3, 40, 8, generator=draw).bfloat16().to(dtype) for _ in range(4))
    given = [each.requires_grad_() for each in (query, key, value)]
    mask = torch.zeros(2, 1, 40, 40, dtype=dtype)
    mask[..., 25:] = -torch.inf
    attend = AttentionInterface()[NAME]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, _ = attend(nn.Module(), *given, mask, dropout=0.0, is_causal=False)
    return [out, *torch.autograd.grad(out, given, g.transpose(1, 2))]


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_computed_in_float32_on_a_cpu(autocast: bool) -> None:
    """Also under autocast, which would cast the arguments back."""
    low, exact = attended(torch.bfloat16, autocast), attended(torch.float32, False)
    assert all(torch.equal(mine, other.bfloat16()) for mine, other in zip(low, exact, strict=True))


def test_float32_is_torchs_own() -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 40, 8, generator=draw) for _ in range(3))
    out, _ = AttentionInterface()[NAME](nn.Module(), query, key, value, None, dropout=0.0, is_causal=True)
    own = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(out, own.transpose(1, 2))
