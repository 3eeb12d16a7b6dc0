"""How far averaging two matrices apart misses the mean of their products: of LoRA, mean(B_i A_i) and mean B mean A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_VALUES = 2**27  # of the updates of a round's clients, which are held together


@dataclass(frozen=True)
class Product:
    """B A of one layer: where the flat vector has B [out, rank] and A [rank, in]. a: None for an A that is not trained,
    and so is the same for all clients."""

    b: slice
    a: slice | None
    rank: int


def product_gap(x: Tensor, updates: Tensor, weights: Tensor, products: Sequence[Product]) -> float | None:
    """|mean(B_i A_i) - mean B mean A| / |mean(B_i A_i) - B A| over all products; None where nothing has moved.

    x [d]: before the round. updates [S, d]: d_i, so that client i has x + d_i. weights [S]: of the means. The norms are
    of the whole model: the root of the sum of squares over layers. 0 if all A are the same.

    With b_i, a_i the updates less their means b, a, the upper difference is mean(b_i a_i), and the lower one is that
    plus (B + b) a + b A. Each is a product of an [out, n] and an [n, in] matrix with n = (S + 2) rank, and its norm
    comes from two Gram matrices [n, n].
    """
    if all(product.a is None for product in products):
        return 0.0
    share = (weights.double() / weights.double().sum()).to(x.device)[:, None, None]
    gap = move = 0.0
    for product in products:
        if product.a is None:
            raise ValueError("some A are trained and some are not")
        B, b = _matrices(x, updates, product.b, (-1, product.rank))
        mean_b = (share * b).sum(0)
        A, a = _matrices(x, updates, product.a, (product.rank, -1))
        mean_a = (share * a).sum(0)
        left = (share * (b - mean_b)).transpose(0, 1).flatten(1)  # [out, S rank]
        right = (a - mean_a).flatten(0, 1)  # [S rank, in]
        inner = _inner(torch.cat([left, B + mean_b, mean_b], dim=1), torch.cat([right, mean_a, A]))
        gap += float(inner[: len(right), : len(right)].sum())
        move += float(inner.sum())
    return (max(gap, 0.0) / move) ** 0.5 if move > 0 else None


def _matrices(x: Tensor, updates: Tensor, where: slice, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The matrix of x and those of the updates [S, ...], in float64."""
    return x[where].double().view(shape), updates[:, where].double().view(len(updates), *shape)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """left'left times right right' by elements [n, n], whose sum is |left right|^2; that of its corner [k, k] is the
    same of the first k columns and rows."""
    return (left.mT @ left) * (right @ right.mT)
