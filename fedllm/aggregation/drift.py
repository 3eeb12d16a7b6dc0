"""Measures how far the clients of a round differ: in their updates and their second moments (FW, sec. 1 and 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm
from fedllm.common.tensors import State


class Drift:
    """Running sums over some of a round's accepted clients, one client at a time, in float64.

    direction [d]: the sum of d_i / |d_i|; it stays in the process that computed it. moments [2, d] or None: the sums of
    v_i and of v_i^2. updates [d]: the sum of d_i; None if the clients send d_i, because the reduction then has their
    mean. For several parts of a round, updates, moments, counts and the results of `along` are added. With
    moments=False those of v_i are left out: a server of real sites never sees v_i.
    """

    def __init__(self, alg: Algorithm, x: Tensor, moments: bool = True) -> None:
        self._moment = alg.moment if moments else None
        self._scalars = x.new_zeros(3, dtype=torch.float64)  # clients, those with d_i != 0, sum of |d_i|
        self.updates = None if "d" in alg.uploads() else x.new_zeros(x.shape, dtype=torch.float64)
        self.direction = x.new_zeros(x.shape, dtype=torch.float64)
        self.moments = x.new_zeros((2, *x.shape), dtype=torch.float64) if self._moment else None

    def add(self, x: Tensor, local: State, rows: Sequence[int]) -> None:
        """Adds these rows of the clients' local state at the end of the round; x [d] is where they started."""
        for row in rows:
            update = local["x"][row].double() - x
            norm = torch.linalg.vector_norm(update)
            self._scalars += torch.stack((torch.ones_like(norm), (norm > 0).to(norm), norm))
            if self.updates is not None:
                self.updates += update
            self.direction += update.div_(norm.clamp_min(torch.finfo(norm.dtype).tiny))
            if self._moment and self.moments is not None:
                v = local[self._moment][row].double()
                self.moments[0] += v
                self.moments[1].addcmul_(v, v)

    @property
    def counts(self) -> dict[str, float]:
        """The number of clients, the number of those with d_i != 0, and the sum of |d_i|."""
        return dict(zip(("clients", "moving", "norms"), self._scalars.tolist(), strict=True))

    def along(self, mean_update: Tensor) -> float:
        """The sum over these clients of d_i . D / |d_i|, for the round's mean update D [d] (float64)."""
        return float(self.direction @ mean_update)


def spread_terms(moments: Tensor, clients: int) -> Tensor:
    """(sum_j std_i(v_ij), sum_j mean_i(v_ij)) [2] over the coordinates j of moments [2, n], the sums of v_i and v_i^2
    over all `clients` of the round."""
    mean = moments[0] / clients
    deviation = (moments[1] / clients - mean.square()).clamp_min(0).sqrt()
    return torch.stack((deviation.sum(), mean.sum()))


def measures(
    counts: dict[str, float], mean_update: Tensor, along: float, spread: Tensor | None
) -> dict[str, float | None]:
    """The drift of a round for metrics.jsonl; None for a measure that is not defined.

    counts, along: sums over all parts of the round. mean_update [d]: D, the mean of the accepted updates d_i = x_i - x,
    by the weights of the aggregation. spread [2]: `spread_terms`, None for an algorithm without a second moment.

    update_norm: mean over clients of |d_i|. mean_update_norm: |D|. update_cosine: mean of cos(d_i, D) over the clients
    with d_i != 0; 1 where all updates have one direction. v_spread: standard deviation of v_i over clients, relative to
    its mean, averaged over coordinates with that mean as weight: sum_j std_i(v_ij) / sum_j mean_i(v_ij); 0 where all
    clients have the same v.
    """
    norm, moving = float(torch.linalg.vector_norm(mean_update)), counts["moving"]
    found = {
        "update_norm": counts["norms"] / counts["clients"] if counts["clients"] else math.nan,
        "mean_update_norm": norm,
        "update_cosine": along / norm / moving if norm > 0 and moving else math.nan,
    }
    if spread is not None:
        deviation, mean = spread.tolist()
        found["v_spread"] = deviation / mean if counts["clients"] > 1 and mean else math.nan
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
