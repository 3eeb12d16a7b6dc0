"""Attention of samples that lie end to end: each sample's own, whatever lies beside it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedllm.problems.lora.sample_attention import SampleGroups


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    mask = None if mask is None else mask.to(q.dtype)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return found.transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.booleans())
def test_outputs_and_gradients_are_those_of_every_sample_alone(lengths: list[int], causal: bool) -> None:
    """Length 0: a client has no more samples."""
    own = np.array(lengths)
    begin = np.cumsum(own) - own
    draw = torch.Generator().manual_seed(0)
    total = int(own.sum())
    q, k, v, g = (torch.randn(1, heads, total, 3, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4))
    row = [value.requires_grad_() for value in (q, k, v)]
    groups = SampleGroups.of(begin, own, causal)
    found = groups.attention(*row, lambda *part: attend(*part, causal))
    assert found.shape == (1, total, 4, 3)
    gradients = torch.autograd.grad(found, row, g.transpose(1, 2))
    for first, length in zip(begin, own, strict=True):
        if length == 0:
            continue
        place = slice(first, first + length)
        alone = [value[:, :, place].detach().requires_grad_() for value in row]
        expected = attend(*alone, None, causal)
        torch.testing.assert_close(found[:, place], expected)
        others = torch.autograd.grad(expected, alone, g[:, :, place].transpose(1, 2))
        for mine, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(mine[:, :, place], other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_less_than_half_of_the_groups_is_padding(lengths: list[int]) -> None:
    own = np.array(lengths)
    found = SampleGroups.of(np.cumsum(own) - own, own, causal=True)
    padded = sum(each.count * each.length for each in found.groups)
    assert sum(each.count for each in found.groups) == len(lengths)
    assert padded == len(found.taken) < 2 * own.sum()
    assert len(found.groups) <= np.log2(own.max() / own.min()) + 1
    assert torch.equal(found.taken[found.back], torch.arange(own.sum()))
