"""Partitions samples over clients.

Each scheme returns `owner` [n]: the client of each sample, or -1 for no client. So no sample can have two clients.
`classes` [n] are int64 ids 0..C-1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.common.seeding import numpy_rng
from fedllm.data.natural_clients import natural_clients

SCHEMES = ("dirichlet_classes", "dirichlet_clients", "dirichlet_clusters", "quantity", "iid", "shards", "by_column")
_WITH_ALPHA = ("dirichlet_classes", "dirichlet_clients", "dirichlet_clusters", "quantity")
DRAWS = 20  # draws before clients with fewer than min_size samples are topped up


def partition(
    labels: np.ndarray,
    *,
    scheme: str,
    clients: int | None,
    alpha: float = 0.1,
    seed: int = 0,
    min_size: int = 1,
    max_size: int | None = None,
    drop_small: bool = False,
    regression: bool = False,
    column: Sequence[Any] | None = None,
    clusters: np.ndarray | None = None,
    shards_per_client: int = 2,
    bins: int = 10,
) -> list[np.ndarray]:
    """The samples of each client: sorted, disjoint int64 indices into `labels` [n].

    scheme: dirichlet_classes, dirichlet_clients, quantity, iid or shards, each a function below; dirichlet_clusters,
    which is dirichlet_classes with `clusters` [n] (ids of clusters.cluster_ids) in place of classes; or by_column, one
    client per distinct value of `column` [n]. These values are sorted, whole numbers first; 1, 1.0 and "1" are the same
    value. Regression targets are divided into `bins` quantile classes.
    min_size: the least number of samples per client. If a client has fewer, the partition is drawn again, up to 20
    draws in all. Then the draw that lacks the fewest samples is topped up with random samples of the largest clients.
    by_column is never topped up; max_size and drop_small are for it alone, see natural_clients.
    All draws come from `seed`. Raises UserError that names the wrong argument.
    """
    classes = stratify(labels, regression, bins)
    if scheme == "by_column":
        return natural_clients(
            column, len(classes), clients, min_size=min_size, max_size=max_size, drop_small=drop_small, seed=seed
        )
    if scheme == "dirichlet_clusters":
        classes = _ids_of_clusters(clusters, len(classes))
    count = _check(len(classes), scheme, clients, alpha, min_size, shards_per_client)

    best, fewest = np.empty(0, np.int64), math.inf
    for draw in range(DRAWS):
        owner = _deal(scheme, classes, count, alpha, shards_per_client, numpy_rng(seed, f"partition/{scheme}", draw))
        sizes = np.bincount(owner[owner >= 0], minlength=count)
        lacking = int(np.maximum(min_size - sizes, 0).sum())
        if lacking < fewest:
            best, fewest = owner, lacking
        if not lacking:
            break
    if fewest:
        best = top_up(best, count, min_size, numpy_rng(seed, "partition/top-up"))
    return [np.flatnonzero(best == client) for client in range(count)]


def stratify(labels: np.ndarray, regression: bool = False, bins: int = 10) -> np.ndarray:
    """Class ids 0..C-1 of `labels` [n], those that occur. Regression: ids of up to `bins` quantile classes."""
    values = np.asarray(labels)
    if values.ndim != 1 or not len(values):
        raise UserError(
            f"partition: found labels of shape {values.shape}, expected one label per sample and some samples"
        )
    if regression:
        if bins < 1:
            raise UserError(f"partition: bins={bins}, expected at least 1")
        edges = np.quantile(values, np.arange(1, bins) / bins)
        values = np.searchsorted(np.unique(edges), values, side="right")
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _ids_of_clusters(clusters: np.ndarray | None, n: int) -> np.ndarray:
    if clusters is None or clusters.shape != (n,):
        found = "none" if clusters is None else f"shape {clusters.shape}"
        raise UserError(f"partition: scheme dirichlet_clusters needs the clusters of {n} samples, found {found}")
    return stratify(clusters)


def summary(parts: Sequence[np.ndarray], classes: np.ndarray, num_classes: int) -> np.ndarray:
    """The number of samples per client and class, int64 [clients, num_classes].

    classes: ids [n]; for regression see stratify.
    """
    return np.stack([np.bincount(classes[samples], minlength=num_classes) for samples in parts])


def _deal(
    scheme: str, classes: np.ndarray, clients: int, alpha: float, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    if scheme == "iid":
        return iid(len(classes), clients, rng)
    if scheme == "shards":
        return shards(classes, clients, per_client, rng)
    if scheme == "quantity":
        return quantity(len(classes), clients, alpha, rng)
    dirichlet = dirichlet_clients if scheme == "dirichlet_clients" else dirichlet_classes
    return dirichlet(classes, clients, alpha, rng)


def _check(n: int, scheme: str, clients: int | None, alpha: float, min_size: int, shards_per_client: int) -> int:
    """Returns the number of clients. Raises UserError if an argument is not valid for n samples."""
    if scheme not in SCHEMES:
        close = nearest(scheme, list(SCHEMES))
        raise UserError(f"partition.scheme: found '{scheme}'{close}, expected one of {', '.join(SCHEMES)}")
    if clients is None or clients < 1:
        raise UserError(f"partition.clients={clients}: expected a number of clients, at least 1")
    if min_size < 1:
        raise UserError(f"partition.min_size={min_size}: expected at least 1")
    if clients * min_size > n:
        raise UserError(
            f"partition.clients={clients}: with min_size={min_size} they need {clients * min_size} samples, "
            f"but the training split has {n}; lower one of the two"
        )
    if scheme in _WITH_ALPHA and not 0 < alpha < math.inf:
        raise UserError(
            f"partition.alpha={alpha}: expected a number above 0 (small = very uneven; for even, scheme: iid)"
        )
    if scheme == "shards" and not 1 <= shards_per_client <= n // clients:
        raise UserError(
            f"partition.shards_per_client={shards_per_client}: expected 1 to {n // clients}, "
            f"for {n} samples and {clients} clients"
        )
    return clients


def iid(n: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Assigns every sample to a random client; client sizes differ by at most one."""
    return rng.permutation(np.arange(n) % clients)


def quantity(n: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Divides random samples over the clients in proportions ~ Dir(alpha): sizes differ, labels do not.

    Li et al. 2022 (NIID-Bench), quantity skew.
    """
    return dirichlet_classes(np.zeros(n, np.int64), clients, alpha, rng)


def shards(classes: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Sorts samples by class and cuts them into clients * per_client even shards.

    Each client gets `per_client` random shards. McMahan et al. 2017, section 3.
    """
    n, count = len(classes), clients * per_client
    shuffled = rng.permutation(n)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    shard = np.empty(n, np.int64)
    shard[by_class] = np.arange(n) * count // n
    return iid(count, clients, rng)[shard]


def dirichlet_classes(classes: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Divides each class over the clients in proportions ~ Dir(alpha); client sizes differ, every sample is used.

    Yurochkin et al. 2019; Li et al. 2022 (NIID-Bench), distribution-based label imbalance.
    """
    owner = np.empty(len(classes), np.int64)
    for label in range(classes.max() + 1):
        samples = rng.permutation(np.flatnonzero(classes == label))
        log_weights = _log_dirichlet(alpha, (clients,), rng)
        weights = np.exp(log_weights - log_weights.max())
        ends = np.rint(np.cumsum(weights) / weights.sum() * len(samples)).astype(np.int64)
        owner[samples] = np.searchsorted(ends, np.arange(len(samples)), side="right")
    return owner


def dirichlet_clients(classes: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Gives every client n // clients samples, with classes drawn from its own mix ~ Dir(alpha).

    The remaining samples have no client. Hsu et al. 2019, with a uniform prior over the C classes. alpha is per class:
    for papers that write Dir(alpha p), with a prior p that sums to 1, their alpha is C times this one.
    Clients draw in random order. When a class has no samples left, clients draw from their mix over the other classes.
    """
    pools = [rng.permutation(np.flatnonzero(classes == label)) for label in range(classes.max() + 1)]
    log_mix = _log_dirichlet(alpha, (clients, len(pools)), rng)
    owner = np.full(len(classes), -1, np.int64)
    turns = rng.permutation(np.repeat(np.arange(clients), len(classes) // clients))
    while len(turns):
        # Gumbel-max draws from the mix, renormalised over the remaining classes; exact for very small weights too.
        draws = log_mix[turns] + rng.gumbel(size=(len(turns), len(pools)))
        choice = np.where([len(pool) > 0 for pool in pools], draws, -np.inf).argmax(axis=1)
        served = np.zeros(len(turns), bool)
        for label, pool in enumerate(pools):
            takers = np.flatnonzero(choice == label)[: len(pool)]
            owner[pool[: len(takers)]] = turns[takers]
            pools[label] = pool[len(takers) :]
            served[takers] = True
        turns = turns[~served]
    return owner


def _log_dirichlet(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Dir(alpha) draws along the last axis, each draw up to an additive constant; finite for alpha > 0.

    Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), with -log U ~ Exp(1). numpy's Dirichlet gives 0 / 0 for small alpha.
    """
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / max(alpha, 1e-300)


def top_up(owner: np.ndarray, clients: int, min_size: int, rng: np.random.Generator) -> np.ndarray:
    """`owner` after clients with fewer than min_size samples have taken random samples from other clients.

    Each sample is taken from the client that is the largest at that moment.
    """
    owner = owner.copy()
    held = [rng.permutation(np.flatnonzero(owner == client)).tolist() for client in range(clients)]
    largest = [(-len(samples), client) for client, samples in enumerate(held)]
    heapq.heapify(largest)
    for client, samples in enumerate(held):
        while len(samples) < min_size:
            giver = largest[0][1]
            samples.append(held[giver].pop())
            heapq.heapreplace(largest, (-len(held[giver]), giver))
        owner[samples] = client
    return owner
