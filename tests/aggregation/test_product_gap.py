"""`lora_gap` against dense products in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedllm.aggregation.product_gap import Product, product_gap


@pytest.mark.parametrize(("clients", "rank", "out", "inside"), [(2, 1, 3, 4), (5, 2, 7, 3), (10, 8, 16, 24)])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_numpys(clients: int, rank: int, out: int, inside: int, weighted: bool) -> None:
    rng, size = np.random.default_rng(clients), rank * (out + inside)
    x, moved = rng.standard_normal(2 * size), 0.1 * rng.standard_normal((clients, 2 * size))
    weights = rng.integers(1, 9, clients).astype(float) if weighted else np.ones(clients)
    gap = move = 0.0
    products = []
    for start in (0, size):
        a, b = slice(start, start + rank * inside), slice(start + rank * inside, start + size)
        products.append(Product(b, a, rank))
        A, B = ((x + moved)[:, a].reshape(-1, rank, inside), (x + moved)[:, b].reshape(-1, out, rank))
        mean_of_products = np.average([Bi @ Ai for Bi, Ai in zip(B, A, strict=True)], axis=0, weights=weights)
        apart = np.average(B, axis=0, weights=weights) @ np.average(A, axis=0, weights=weights)
        before = x[b].reshape(out, rank) @ x[a].reshape(rank, inside)
        gap += np.square(mean_of_products - apart).sum()
        move += np.square(mean_of_products - before).sum()
    given = (torch.from_numpy(value) for value in (x, moved, weights))
    assert product_gap(*given, products) == pytest.approx(np.sqrt(gap / move), rel=1e-9)


def test_equal_a_give_exactly_zero() -> None:
    rng = torch.Generator().manual_seed(0)
    x, moved = torch.randn(20, generator=rng), torch.randn(6, 20, generator=rng)
    moved[:, :10] = moved[0, :10]
    same = [Product(slice(10, 20), slice(0, 10), 2)]
    assert product_gap(x, torch.cat([moved[:, :10] * 0, moved[:, 10:]], dim=1), torch.ones(6), same) == 0
    assert product_gap(x, moved, torch.ones(6), [Product(slice(0, 20), None, 2)]) == 0
    assert product_gap(x, moved * 0, torch.ones(6), same) is None
