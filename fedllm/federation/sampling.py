"""Samples the clients of a round, and divides them into parts of nearly equal work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedllm.common.seeding import numpy_rng

Sampling = Literal["fixed", "poisson"]


def sample(
    seed: int, round: int, num_clients: int, sampled: int, tracked: int, sampling: Sampling = "fixed"
) -> tuple[list[int], list[int]]:
    """The clients of a round, and those of them that are tracked; both sorted.

    fixed: S clients uniformly without replacement, and a uniform subset of T of them. poisson: each client by itself
    with probability S/N, and each of these with probability T/S; there may be none.
    """
    if sampling == "poisson":
        clients = np.flatnonzero(numpy_rng(seed, "sample", round).random(num_clients) < sampled / num_clients)
        kept = numpy_rng(seed, "track", round).random(num_clients)[clients] < tracked / sampled
        return clients.tolist(), clients[kept].tolist()
    chosen = numpy_rng(seed, "sample", round).choice(num_clients, sampled, replace=False)
    subset = numpy_rng(seed, "track", round).choice(chosen, tracked, replace=False)
    return sorted(chosen.tolist()), sorted(subset.tolist())


def chance_of_more(faulty: int, bad: int, num_clients: int, sampled: int) -> float:
    """The probability that a round of S of N clients has more than `faulty` of the `bad` ones (hypergeometric)."""
    ways = sum(
        math.comb(bad, found) * math.comb(num_clients - bad, sampled - found)
        for found in range(faulty + 1, min(bad, sampled) + 1)
    )
    return ways / math.comb(num_clients, sampled)


def deal(work: Mapping[int, float], shares: int) -> list[list[int]]:
    """Divides the clients into at most `shares` parts of nearly equal work. No part is empty; each is in falling order.

    The client with the most work goes to the part with the least work so far. Depends on `work` and `shares` alone.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [0.0] * shares
    for client in sorted(work, key=lambda client: (-work[client], client)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(client)
        loads[lightest] += work[client]
    return [clients for clients in dealt if clients]
