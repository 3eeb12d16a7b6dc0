"""The robust rules against plain numpy, written from their papers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedllm.aggregation import robust
from fedllm.aggregation.settings import RobustSettings
from fedllm.common.errors import UserError

CASES = [(s, f) for s, f in itertools.product((7, 8, 12, 20), (1, 2, 3)) if s >= 2 * f + 3]


def tables(size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Rows [S, 40]: of any size, with ties in coordinates, and with equal rows."""
    rng = np.random.default_rng(size)
    yield rng.standard_normal((size, 40)) * 10.0 ** rng.integers(-3, 3, (size, 1))
    yield rng.integers(-2, 3, (size, 40)).astype(float)
    twins = rng.standard_normal((size, 40))
    twins[size // 2 :] = twins[0] * 30
    yield twins


def plain_distances(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([[((a - b) ** 2).sum() for b in rows] for a in rows])


def plain_krum(rows: np.ndarray[Any, Any], faulty: int) -> list[int]:
    apart = plain_distances(rows)
    scores = []
    for i in range(len(rows)):
        others = sorted(apart[i, j] for j in range(len(rows)) if j != i)
        scores.append(sum(others[: len(rows) - faulty - 2]))
    return sorted(sorted(range(len(rows)), key=lambda i: scores[i])[: len(rows) - faulty])


def plain_nnm(rows: np.ndarray[Any, Any], faulty: int) -> np.ndarray[Any, Any]:
    apart, count = plain_distances(rows), len(rows) - faulty
    mixed = np.array([rows[np.argsort(apart[i], kind="stable")[:count]].mean(0) for i in range(len(rows))])
    return np.sort(mixed, axis=0)[faulty : len(rows) - faulty].mean(0)


def close(found: Tensor, expected: np.ndarray[Any, Any]) -> None:
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "faulty"), CASES)
def test_rules_are_those_of_numpy(size: int, faulty: int) -> None:
    for plain in tables(size):
        rows = torch.from_numpy(plain)
        apart = robust.squared_distances(rows)
        close(apart, plain_distances(plain))
        close(robust.mean(rows), plain.mean(0))
        close(robust.median(rows), np.median(plain, axis=0))
        close(robust.trimmed_mean(rows, faulty), np.sort(plain, axis=0)[faulty : size - faulty].mean(0))
        close(robust.nnm_trimmed_mean(rows, apart, faulty), plain_nnm(plain, faulty))
        assert robust.multi_krum(robust.krum_scores(apart, faulty), faulty) == plain_krum(plain, faulty)


def test_chunks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(9, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = (robust.median(rows), robust.trimmed_mean(rows, 2), robust.squared_distances(rows))
    monkeypatch.setattr(robust, "CHUNK", 77)
    for one, cut in zip(
        whole, (robust.median(rows), robust.trimmed_mean(rows, 2), robust.squared_distances(rows)), strict=True
    ):
        torch.testing.assert_close(one, cut, rtol=1e-12, atol=1e-12)


def test_the_order_of_the_rows_changes_no_bit_of_a_rule_by_coordinate() -> None:
    rows = torch.randn(8, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    other = rows[torch.randperm(8, generator=torch.Generator().manual_seed(2))]
    assert torch.equal(robust.median(rows), robust.median(other))
    assert torch.equal(robust.trimmed_mean(rows, 3), robust.trimmed_mean(other, 3))
    found = robust.krum_scores(robust.squared_distances(rows), 2)
    assert torch.equal(found.sort().values, robust.krum_scores(robust.squared_distances(other), 2).sort().values)


@pytest.mark.parametrize("lie", [0.0, -10.0, 1e9])
def test_bad_clients_reach_no_further_than_the_page_says(lie: float) -> None:
    """docs/guides/robustness.md: between the honest values, and near the honest mean."""
    honest = 1 + 0.5 * torch.randn(8, 300, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows = torch.cat([honest[:4], lie * honest.mean(0, keepdim=True).expand(3, -1), honest[4:]])
    for found in (robust.median(rows), robust.trimmed_mean(rows, 3)):
        assert bool(((honest.min(0).values <= found) & (found <= honest.max(0).values)).all())
    variance = float((honest - honest.mean(0)).square().sum(1).mean())
    near = robust.nnm_trimmed_mean(rows, robust.squared_distances(rows), 3)
    assert float((near - honest.mean(0)).square().sum()) <= 3 / 11 * 2 * variance
    kept = robust.multi_krum(robust.krum_scores(robust.squared_distances(rows), 3), 3)
    assert len(kept) == 8
    if lie == 1e9:
        assert kept == [0, 1, 2, 3, 7, 8, 9, 10]


def test_a_small_vector_counts_as_much_as_a_large_one() -> None:
    """A client that lies in a vector of small numbers alone is farthest from the others."""
    rng = torch.Generator().manual_seed(3)
    d, v = (torch.randn(9, 50, generator=rng, dtype=torch.float64) for _ in range(2))
    alone = robust.krum_scores(robust.squared_distances(d), 2)
    liar = int(alone.argmin())
    v *= 1e-6
    v[liar] *= -10
    assert liar in robust.multi_krum(alone, 2)
    both = robust.distances({"d": d, "v": v}, 2)
    assert liar not in robust.multi_krum(robust.krum_scores(both, 2), 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"faulty": 1}, "faulty: found 1 with rule=mean, which withstands none"),
        ({"rule": "median"}, "faulty: missing, but rule=median needs it"),
        ({"rule": "median", "faulty": 0}, "faulty: found 0, expected 1 or more"),
        ({"norm": 0.5}, "norm: found 0.5, expected 1 or more"),
    ],
)
def test_bad_settings(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RobustSettings(**keys)
