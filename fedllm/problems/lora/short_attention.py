"""Attention of short rows on a CPU, for values of 16 bits: plain matrix products instead of torch's fused kernel.

The kernel is made for long rows. It is also slow in bfloat16 (see attention.py), so that values must be cast to float32
for it, and these copies are saved. Plain products of up to SHORT tokens are 1.2 to 2.2 times as fast, and save less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SHORT = 128  # tokens of a row; with more, the fused kernel is as fast or faster


class ShortAttention(Function):
    """softmax(scale * q k' + mask) v for q [R, H, L, h] and k, v [R, G, L, h].

    H / G heads of q share one head of k and v.
    Scores, softmax and their gradients are float32; probabilities are rounded to the dtype of v for their product with
    v, and saved so.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        rows, heads, length, _ = q.shape
        scores = _grouped(q, k).float() @ k.float().mT
        scores = scores.view(rows, heads, length, length).mul_(scale)
        if mask is not None:
            scores += mask
        p = scores.softmax(dim=-1).to(v.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return (_grouped(p, k) @ v).view_as(q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        needs_q, needs_k, needs_v, *_ = ctx.needs_input_grad
        g, p = _grouped(g, k), _grouped(p, k)
        gq = gk = gv = None
        if needs_v:
            gv = p.mT @ g
        if needs_q or needs_k:
            p = p.float()
            gp = g.float() @ v.float().mT
            gs = torch._softmax_backward_data(gp, p, -1, torch.float32).mul_(ctx.scale).to(q.dtype)
            gq = (gs @ k).view_as(q) if needs_q else None
            gk = gs.mT @ _grouped(q, k) if needs_k else None
        return gq, gk, gv, None, None


def short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """See ShortAttention. mask: bool (where a token attends) or what is added to the scores, as for
    scaled_dot_product_attention; causal: tokens attend to earlier ones only, where there is no mask."""
    length = q.shape[2]
    if mask is None and causal:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    found: Tensor = ShortAttention.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
    return found


def _grouped(value: Tensor, k: Tensor) -> Tensor:
    """[R, H, L, n] with the heads that share a head of k side by side: [R, G, H / G * L, n]."""
    return value.reshape(*k.shape[:2], -1, value.shape[-1])
