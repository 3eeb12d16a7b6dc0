"""Attention of short rows as plain products: that of torch, with the rounding of bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedllm.problems.lora.short_attention import ShortAttention, short_attention


def drawn(heads: int, shared: int, dtype: torch.dtype, length: int = 11) -> list[Tensor]:
    """q [2, H, L, 6], k and v [2, G, L, 6]."""
    draw = torch.Generator().manual_seed(heads)
    shapes = [(2, count, length, 6) for count in (heads, shared, shared)]
    return [torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def masks() -> dict[str, Tensor | None]:
    draw = torch.Generator().manual_seed(1)
    attends = torch.rand(2, 1, 11, 11, generator=draw) < 0.5
    attends |= torch.eye(11, dtype=torch.bool)
    added = torch.zeros(attends.shape).masked_fill_(~attends, -torch.inf)
    return {"none": None, "bool": attends, "added": added, "padding": added[:, :, :1].clone()}


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (3, 1)])
def test_it_is_torchs_attention(mask: str, causal: bool, heads: int, shared: int) -> None:
    """Also where several heads of q share one of k and v, and with every kind of mask."""
    given, shown = drawn(heads, shared, torch.bfloat16), masks()[mask]
    exact = [value.detach().double().requires_grad_() for value in given]
    g = torch.randn(2, heads, 11, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = short_attention(*given, shown, causal, 0.4)
    wanted = F.scaled_dot_product_attention(
        *exact,
        attn_mask=shown if shown is None or shown.dtype == torch.bool else shown.double(),
        is_causal=causal and shown is None,
        scale=0.4,
        enable_gqa=True,
    )
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < 2**-8 * wanted.norm()
    gradients = torch.autograd.grad(found, given, g)
    for mine, other in zip(gradients, torch.autograd.grad(wanted, exact, g.double()), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - other).norm() < 2**-7 * other.norm()


@pytest.mark.parametrize("wanted", range(3))
def test_only_the_gradients_that_are_asked_for_are_computed(wanted: int) -> None:
    """They are exact in float32, whose rounding is none of bfloat16's."""
    given = [value.detach() for value in drawn(6, 2, torch.float32)]
    given[wanted].requires_grad_()
    found = ShortAttention.apply(*given, None, 0.4)
    expected = F.scaled_dot_product_attention(*given, scale=0.4, enable_gqa=True)
    g = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (mine,), (other,) = (torch.autograd.grad(value, [given[wanted]], g) for value in (found, expected))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_a_row_of_a_client_that_diverged_spoils_no_other() -> None:
    given = [value.detach() for value in drawn(4, 4, torch.bfloat16)]
    fine = short_attention(*given, None, False, 0.4)
    given[0][1] = torch.nan
    spoilt = short_attention(*given, None, False, 0.4)
    assert torch.equal(spoilt[0], fine[0])
    assert spoilt[1].isnan().all()
