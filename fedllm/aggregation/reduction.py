"""Reduces the accepted uploads of a round to what the server needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedllm.aggregation.base import SumParts
from fedllm.aggregation.upload_checks import misfit
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Rows, lengths
from fedllm.common.errors import RunError, UserError
from fedllm.common.tensors import State


class WeightedMean:
    """The weighted mean of the uploads, and the plain sum of the tracked ones, by running float64 sums.

    info: the facts of the round. The sums {name: [length]} and counts {name: number} of all parts of a round are added
    before `result` is called.
    """

    def __init__(self, alg: Algorithm, declared: Declared, info: RoundInfo, device: torch.device) -> None:
        self._tracked_names = list(alg.tracked_uploads())
        self._dtype = declared.dtype
        self.sums: State = {
            name: torch.zeros(length, dtype=torch.float64, device=device) for name, length in declared.sent.items()
        }
        self.counts = {"weight": 0.0, "rate_sum": 0.0, "clients": 0, "tracked": 0}

    def add(self, uploads: Uploads, rows: Rows, accepted: list[int], weights: Tensor) -> None:
        """Adds the accepted rows of some clients' uploads; weights [len(accepted)]: for the means only."""
        tracked = rows.tracked[accepted].double()
        for name, total in self.sums.items():
            factor = tracked if name in self._tracked_names else weights[:, None]
            total += (uploads.sent[name][accepted].double() * factor).sum(dim=0)
        self.counts["weight"] += float(weights.sum())
        self.counts["rate_sum"] += float((weights * rows.rate_sum[accepted, 0].double()).sum())
        self.counts["clients"] += len(accepted)
        self.counts["tracked"] += int(tracked.sum())

    @property
    def clients(self) -> int:
        """Clients added so far."""
        return int(self.counts["clients"])

    def note(self) -> dict[str, float]:
        """The counts."""
        return self.counts

    def add_note(self, note: Mapping[str, float]) -> None:
        """Adds the counts of a part of the round."""
        for name, count in note.items():
            self.counts[name] += count

    def join(self, parts: Sequence[WeightedMean], sum_parts: SumParts) -> None:
        """Adds the sums of all parts. parts: those of this process."""
        names, sizes = list(self.sums), [len(value) for value in self.sums.values()]
        flat = torch.cat(list(self.sums.values()))
        total = sum_parts([torch.cat([part.sums[name] for name in names]) for part in parts], flat)
        self.sums = dict(zip(names, torch.split(total, sizes), strict=True))

    def settle(self, rejected: int) -> dict[int, str]:
        """Leaves nobody out."""
        return {}

    def mean_update(self) -> Tensor:
        """The mean [d] (float64) of the updates d_i."""
        return self.sums["d"] / self.counts["weight"]

    def result(self) -> Reduced:
        """The means and totals, in x's dtype."""
        weight = self.counts["weight"]
        mean = {n: (s / weight).to(self._dtype) for n, s in self.sums.items() if n not in self._tracked_names}
        total = {name: self.sums[name].to(self._dtype) for name in self._tracked_names}
        rate_sum = self.counts["rate_sum"] / weight
        return Reduced(mean, total, rate_sum, self.clients, int(self.counts["tracked"]))


def aggregate(alg: Algorithm, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
    """Calls alg.aggregate and checks its answer. Raises UserError if names, shapes or dtypes are not those that `alg`
    declares, RunError if a value is not finite."""
    answer: Any = alg.aggregate(x, server, reduced, info)
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise UserError(f"{type(alg).__name__}.aggregate: found {type(answer).__name__}, expected (x, server vectors)")
    shapes = {name: (size,) for name, size in lengths(alg.server_vectors(), x, info).items()}
    if why := misfit({"x": answer[0]}, {"x": tuple(x.shape)}, x.dtype):
        raise UserError(f"{type(alg).__name__}.aggregate: {why}, as the x it was given")
    if why := misfit(answer[1], shapes, x.dtype):
        raise UserError(f"{type(alg).__name__}.aggregate: {why}, as server_vectors declares")
    if not all(bool(torch.isfinite(value).all()) for value in (answer[0], *answer[1].values())):
        raise RunError(f"round {info.index + 1}: the aggregated model is not finite; lower algorithm.lr or server_lr")
    return answer


def require_enough(accepted: int, least: int, rejected: Mapping[int, str], index: int) -> None:
    """Raises RunError, with the rejected clients, if fewer than `least` uploads were accepted, or none."""
    if accepted >= max(1, least):
        return
    reasons = "\n".join(f"  client {client}: {why}" for client, why in sorted(rejected.items()))
    diverged = all("not finite" in why for why in rejected.values())
    advice = "; the learning rate may be too large" if rejected and diverged else ""
    raise RunError(
        f"round {index + 1}: {accepted} accepted uploads, min_clients asks for {max(1, least)}{advice}. "
        f"Rejected:\n{reasons}"
    )
