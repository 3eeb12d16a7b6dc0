"""Robust rules on the rows [S, n] that S clients sent, of which at most `faulty` may be anything.

The arithmetic is in float64, CHUNK coordinates at a time. Ties go to the row that comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

CHUNK = 65_536  # coordinates of all rows that are worked on at once


def by_chunk(rows: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """rule applied to CHUNK coordinates [S, at most CHUNK] (float64) at a time; the answers joined [n]."""
    return torch.cat([rule(chunk.double()) for chunk in torch.split(rows, CHUNK, dim=1)])


def mean(rows: Tensor) -> Tensor:
    """The mean [n] of rows [S, n]."""
    return by_chunk(rows, lambda chunk: chunk.sum(0) / len(chunk))


def median(rows: Tensor) -> Tensor:
    """The median [n] of each coordinate of rows [S, n]; for even S the mean of the two in the middle (Yin 2018)."""
    low, high = (len(rows) - 1) // 2, len(rows) // 2

    def middle(chunk: Tensor) -> Tensor:
        ordered = chunk.sort(dim=0).values
        return (ordered[low] + ordered[high]) / 2

    return by_chunk(rows, middle)


def trimmed_mean(rows: Tensor, faulty: int) -> Tensor:
    """The mean [n] of each coordinate without its `faulty` largest and smallest values (Yin 2018). S > 2 faulty."""
    return by_chunk(rows, lambda chunk: chunk.sort(dim=0).values[faulty : len(chunk) - faulty].mean(0))


def squared_distances(rows: Tensor) -> Tensor:
    """|row i - row j|^2 [S, S] (float64) of rows [S, n]."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for chunk in torch.split(rows, CHUNK, dim=1):
        values = chunk.double()
        total += torch.stack([(values - row).square_().sum(1) for row in values])
    return total


def distances(vectors: Mapping[str, Tensor], faulty: int) -> Tensor:
    """Squared distances [S, S] of clients that sent several vectors {name: [S, n]}.

    Each vector's distances are divided by their scale, so that each counts alike: the median over clients of the sum of
    the distances to the nearest S - faulty rows, which `faulty` clients cannot move beyond those of the others.
    """
    found = {name: squared_distances(rows) for name, rows in vectors.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    total = torch.zeros_like(next(iter(found.values())))
    for each in found.values():
        scale = float(each.sort(dim=1).values[:, : len(each) - faulty].sum(1).median())
        total += each / (scale or 1.0)
    return total


def mix_nearest(rows: Tensor, distances: Tensor, faulty: int) -> Tensor:
    """Each row of rows [S, n] replaced by the mean of the S - faulty rows nearest to it, itself among them (float64).

    Nearest-neighbour mixing (NNM), Allouah 2023, Algorithm 1. distances [S, S]: squared.
    """
    count = len(rows) - faulty
    nearest = distances.sort(dim=1, stable=True).indices[:, :count].sort(dim=1).values
    return torch.stack([rows[near].double().sum(0) / count for near in nearest])


def nnm_trimmed_mean(rows: Tensor, distances: Tensor, faulty: int) -> Tensor:
    """The trimmed mean [n] of rows [S, n] after nearest-neighbour mixing. distances [S, S]: squared. S > 2 faulty."""
    return by_chunk(rows, lambda chunk: trimmed_mean(mix_nearest(chunk, distances, faulty), faulty))


def krum_scores(distances: Tensor, faulty: int) -> Tensor:
    """For each row the sum [S] of the squared distances to its S - faulty - 2 nearest others (Blanchard 2017, sec. 4).

    distances [S, S]: squared.
    """
    size = len(distances)
    others = distances.masked_fill(torch.eye(size, dtype=torch.bool, device=distances.device), torch.inf)
    return others.sort(dim=1).values[:, : size - faulty - 2].sum(1)


def multi_krum(scores: Tensor, faulty: int) -> list[int]:
    """The S - faulty rows with the lowest scores [S], in the order of the rows (multi-Krum, Blanchard 2017, sec. 5)."""
    lowest = scores.sort(stable=True).indices[: len(scores) - faulty]
    return sorted(lowest.tolist())
