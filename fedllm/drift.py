"""How far the clients of a round part: their updates, and their second moments (FW, sec. 1 and 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm, State


class Drift:
    """Running sums over a round's accepted clients, a client at a time, in float64.

    sums: named tensors. Those of clients that trained elsewhere may be added to them, so a round may be cut anywhere.
    """

    def __init__(self, alg: Algorithm, x: Tensor) -> None:
        self._moment = alg.moment
        scalars = dict.fromkeys(("clients", "moving", "length"), ())
        vectors = dict.fromkeys(("update", "direction", *(("v", "v_squared") if alg.moment else ())), x.shape)
        self.sums: State = {
            name: x.new_zeros(shape, dtype=torch.float64) for name, shape in {**scalars, **vectors}.items()
        }

    def add(self, x: Tensor, local: State, rows: Sequence[int]) -> None:
        """Adds these rows of a cohort's local state at the end of the round; x [d] is where they started."""
        sums = self.sums
        for row in rows:
            update = local["x"][row].double() - x
            length = torch.linalg.vector_norm(update)
            sums["clients"] += 1
            sums["moving"] += length > 0
            sums["length"] += length
            sums["update"] += update
            sums["direction"] += update.div_(length.clamp_min(torch.finfo(length.dtype).tiny))
            if self._moment:
                v = local[self._moment][row].double()
                sums["v"] += v
                sums["v_squared"].addcmul_(v, v)

    def measures(self) -> dict[str, float | None]:
        """The round's line in metrics.jsonl; None where a measure has no meaning.

        update_norm: mean over clients of |d_i|, d_i = x_i - x. mean_update_norm: |mean d_i|. update_cosine: mean over
        the clients that moved of cos(d_i, mean d_i); 1 where all pull the same way. v_spread, of an algorithm with a
        local second moment: standard deviation of v_i over clients, relative to its mean, averaged over coordinates
        with that mean as weight: sum_j std_i(v_ij) / sum_j mean_i(v_ij); 0 where all clients have the same v.
        """
        sums = self.sums
        clients, moving = int(sums["clients"]), int(sums["moving"])
        length = float(torch.linalg.vector_norm(sums["update"]))
        along = float(sums["direction"] @ sums["update"])
        found = {
            "update_norm": float(sums["length"]) / clients,
            "mean_update_norm": length / clients,
            "update_cosine": along / length / moving if length > 0 else math.nan,
        }
        if self._moment:
            mean = sums["v"] / clients
            deviation = (sums["v_squared"] / clients - mean.square()).clamp_min(0).sqrt()
            found["v_spread"] = float(deviation.sum() / mean.sum()) if clients > 1 else math.nan
        return {name: value if math.isfinite(value) else None for name, value in found.items()}
