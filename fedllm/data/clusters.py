"""Clusters of like texts or images: k-means over their features, which stands in for classes in a partition."""

from __future__ import annotations

import numpy as np

from fedllm.common.errors import UserError
from fedllm.common.seeding import numpy_rng
from fedllm.data.features import Features, features_of
from fedllm.data.split import Split

FITTED = 10_000  # the most samples from which the centres are found; the others then get the nearest centre
_ITERATIONS = 50
_CHUNK = 4096  # samples whose features are in memory at once, besides the fitted ones
_CENTRE_SCALE = 64  # centres are whole numbers in steps of 1/64


def cluster_ids(split: Split, clusters: int, seed: int) -> np.ndarray:
    """The cluster of each sample, int64 ids below `clusters` [n], a function of samples and seed alone.

    Lloyd's algorithm after k-means++ (Arthur & Vassilvitskii 2007) in whole numbers: the same bits on every machine and
    for every number of threads. Raises UserError for clusters < 2 and for fewer distinct samples than clusters.
    """
    if clusters < 2:
        raise UserError(f"partition.clusters={clusters}: expected at least 2")
    rng = numpy_rng(seed, "partition/clusters")
    fit = np.sort(rng.permutation(len(split))[:FITTED])
    features = features_of(split, fit)
    points = features(fit)
    if (distinct := len({point.tobytes() for point in points})) < clusters:
        raise UserError(
            f"partition.clusters={clusters}: found {distinct:,} samples with distinct features, expected at least "
            f"{clusters}; lower it"
        )
    centres = _find_centres(points, clusters, rng)
    return _nearest_of_all(features, len(split), centres)


def _find_centres(points: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """The centres of the points [m, D], in units of 1 / _CENTRE_SCALE: whole numbers as float64 [clusters, D]."""
    centres = _CENTRE_SCALE * _spread(points, clusters, rng)
    before = np.full(len(points), -1)
    for _ in range(_ITERATIONS):
        owner = _nearest(points, centres)
        if np.array_equal(owner, before):
            break
        before = owner
        for cluster in np.unique(owner):  # one without points keeps its centre
            centres[cluster] = np.rint(_CENTRE_SCALE * points[owner == cluster].mean(axis=0))
    return centres


def _spread(points: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """First centres by k-means++: each a point drawn by its squared distance from the nearest centre so far."""
    chosen = [int(rng.integers(len(points)))]
    squares = (points**2).sum(axis=1)
    distances = np.full(len(points), np.inf)
    while len(chosen) < clusters:
        last = chosen[-1]
        distances = np.minimum(distances, squares - 2 * points @ points[last] + squares[last])
        chosen.append(int(np.searchsorted(np.cumsum(distances), rng.random() * distances.sum(), side="right")))
    return points[chosen]


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The nearest centre of each point, the first one of equally near ones: int64 [m]."""
    owner: np.ndarray = ((centres**2).sum(axis=1) - 2 * _CENTRE_SCALE * points @ centres.T).argmin(axis=1)
    return owner


def _nearest_of_all(features: Features, n: int, centres: np.ndarray) -> np.ndarray:
    chunks = (np.arange(start, min(start + _CHUNK, n)) for start in range(0, n, _CHUNK))
    return np.concatenate([_nearest(features(rows), centres) for rows in chunks])
