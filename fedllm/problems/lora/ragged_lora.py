"""LoRA of several clients whose rows differ in number: one small matrix product per client, in one autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class RaggedLora(Function):
    """frozen + scale * x A' B', where client c's part of x [T, in] and frozen [T, out] are its `counts[c]` rows, one
    client after the other, and A [C, r, in], B [C, out, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, frozen: Tensor, A: Tensor, B: Tensor, counts: Sequence[int], scale: float
    ) -> Tensor:
        h, out = x.new_empty(len(x), A.shape[1]), torch.empty_like(frozen)
        for a, b, xs, fs, hs, outs in zip(A, B, *_parts(counts, x, frozen, h, out), strict=True):
            torch.mm(xs, a.T, out=hs)
            torch.addmm(fs, hs, b.T, alpha=scale, out=outs)
        ctx.save_for_backward(x, A, B, h)
        ctx.counts, ctx.scale = list(counts), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, A, B, h = ctx.saved_tensors
        g, scale = g.contiguous(), ctx.scale
        gx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        gA = torch.empty_like(A) if ctx.needs_input_grad[2] else None
        gB, gh = torch.empty_like(B), torch.empty_like(h)
        parts = _parts(ctx.counts, x, g, h, gh)
        for c, (xs, gs, hs, ghs) in enumerate(zip(*parts, strict=True)):
            torch.mm(gs, B[c], out=ghs).mul_(scale)
            torch.mm(gs.T, hs, out=gB[c]).mul_(scale)
            if gA is not None:
                torch.mm(ghs.T, xs, out=gA[c])
        if gx is not None:
            for a, ghs, gxs in zip(A, *_parts(ctx.counts, gh, gx), strict=True):
                torch.mm(ghs, a, out=gxs)
        return gx, g if ctx.needs_input_grad[1] else None, gA, gB, None, None


def ragged_lora(x: Tensor, frozen: Tensor, A: Tensor, B: Tensor, counts: Sequence[int], scale: float) -> Tensor:
    """See RaggedLora."""
    found: Tensor = RaggedLora.apply(x, frozen, A, B, counts, scale)  # type: ignore[no-untyped-call]
    return found


def _parts(counts: Sequence[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The clients' rows of each tensor."""
    return [torch.split(tensor, list(counts)) for tensor in tensors]
