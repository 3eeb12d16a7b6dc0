"""Attention of stacked models: transformers' own, and on a CPU in float32 or as plain products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from fedllm.problems.lora.attention import NAME
from fedllm.problems.lora.short_attention import SHORT


def attended(dtype: torch.dtype, autocast: bool, length: int, scaling: float | None = None) -> list[Tensor]:
    """Output [2, L, heads, h] and gradients of the query, key and value [2, heads, L, h], whose values are bfloat16."""
    draw = torch.Generator().manual_seed(0)
    query, key, value, g = (torch.randn(2, 3, length, 8, generator=draw).bfloat16().to(dtype) for _ in range(4))
    given = [each.requires_grad_() for each in (query, key, value)]
    mask = torch.zeros(2, 1, length, length, dtype=dtype)
    mask[..., 25:] = -torch.inf
    attend = AttentionInterface()[NAME]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, _ = attend(nn.Module(), *given, mask, dropout=0.0, is_causal=False, scaling=scaling)
    return [out, *torch.autograd.grad(out, given, g.transpose(1, 2))]


@pytest.mark.parametrize("autocast", [False, True])
def test_long_rows_of_bfloat16_are_computed_in_float32_on_a_cpu(autocast: bool) -> None:
    """Also under autocast, which would cast the arguments back."""
    low, exact = attended(torch.bfloat16, autocast, SHORT + 1), attended(torch.float32, False, SHORT + 1)
    assert all(torch.equal(mine, other.bfloat16()) for mine, other in zip(low, exact, strict=True))


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("autocast", [False, True])
def test_short_rows_of_bfloat16_differ_by_their_rounding_alone(autocast: bool, scaling: float | None) -> None:
    low, exact = attended(torch.bfloat16, autocast, 40, scaling), attended(torch.float32, False, 40, scaling)
    for mine, other in zip(low, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert 0 < float((mine.detach() - other.detach()).norm() / other.detach().norm()) < 2**-7


def test_options_that_plain_products_do_not_have_are_transformers_own() -> None:
    """A soft cap is refused there, and dropout is drawn."""
    given = [torch.randn(1, 1, 4, 8).bfloat16() for _ in range(3)]
    attend = AttentionInterface()[NAME]
    with pytest.raises(ValueError, match="softcap"):
        attend(nn.Module(), *given, None, softcap=30.0)
    ones = [*given[:2], torch.ones(1, 1, 4, 8).bfloat16()]
    assert float((attend(nn.Module(), *ones, None, dropout=0.5, is_causal=False)[0] - 1).abs().max()) > 0.1


def test_float32_is_torchs_own() -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 40, 8, generator=draw) for _ in range(3))
    out, _ = AttentionInterface()[NAME](nn.Module(), query, key, value, None, dropout=0.0, is_causal=True)
    own = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(out, own.transpose(1, 2))
