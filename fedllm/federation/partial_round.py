"""The results of training one part of a round's clients, and how the parts are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedllm.aggregation.drift import Drift, measures, spread_terms
from fedllm.aggregation.privacy import PrivateMean
from fedllm.aggregation.reduction import WeightedMean
from fedllm.federation.client_states import ClientVectors
from fedllm.federation.executor import Executor, describe
from fedllm.federation.setup import Setup


@dataclass
class PartialRound:
    """The sums and records of some of a round's clients.

    staged: vectors that the accepted clients keep. losses: the mean over the steps, of each accepted client. rejected:
    client -> reason. bytes_up: of all uploads; most_up: of the largest. slowest: seconds of the slowest client, see
    RoundReport. forced: clients trained together after memory ran out, see HalvingBatches; None if it did not. clipped:
    the number of accepted clients whose vector was above its norm, see RoundReport.
    """

    reduction: WeightedMean
    drift: Drift
    staged: dict[int, ClientVectors] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    most_up: int = 0
    slowest: float = 0.0
    forced: int | None = None
    clipped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, setup: Setup, x: Tensor) -> PartialRound:
        """Before any client has been trained."""
        reduction = setup.pipeline.reduction(setup.algorithm, setup.declared(x), setup.info, x.device)
        return cls(reduction, Drift(setup.algorithm, x))

    def note(self) -> dict[str, Any]:
        """Everything except the vectors, as plain data for the other processes."""
        return {
            "counts": self.reduction.counts,
            "drift": self.drift.counts,
            "losses": self.losses,
            "rejected": list(self.rejected.items()),
            "bytes_up": self.bytes_up,
            "most_up": self.most_up,
            "slowest": self.slowest,
            "forced": self.forced,
            "clipped": self.clipped,
            "staged": describe(self.staged),
        }

    def count_clipped(self, clipped: Mapping[str, Tensor], rows: list[int]) -> None:
        """Counts these rows of what the steps noted, name -> [C]."""
        for name, marks in clipped.items():
            self.clipped[name] = self.clipped.get(name, 0) + int(marks[rows].sum())

    def noised(self) -> dict[str, Any]:
        """What RoundReport says of the clips and the noise of client-level privacy; {} without it."""
        if not isinstance(self.reduction, PrivateMean):
            return {}
        shares = {name: count / self.reduction.clients for name, count in self.clipped.items()}
        return {"clipped": shares, "noise_ratio": self.reduction.noise_ratio("d")}

    def add(self, note: dict[str, Any]) -> None:
        """Adds another part's records, without its vectors."""
        for name, count in note["counts"].items():
            self.reduction.counts[name] += count
        self.losses += note["losses"]
        self.rejected |= dict(note["rejected"])
        self.bytes_up += note["bytes_up"]
        self.most_up, self.slowest = max(self.most_up, note["most_up"]), max(self.slowest, note["slowest"])
        for name, count in note["clipped"].items():
            self.clipped[name] = self.clipped.get(name, 0) + count
        self.forced = min((size for size in (self.forced, note["forced"]) if size), default=None)


def in_order(notes: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """The notes of the `count` parts in the order of the parts. notes: those of each process, for its own parts."""
    return [notes[part % len(notes)][part // len(notes)] for part in range(count)]


def join(
    setup: Setup, x: Tensor, mine: Sequence[PartialRound], notes: Sequence[Any], executor: Executor
) -> PartialRound:
    """Joins all parts of a round. Every process gets the same, except `staged`, which has the clients of this process.

    mine: this process's parts. notes: of all parts, in their order.
    """
    whole = PartialRound.empty(setup, x)
    for note in notes:
        whole.add(note)
    names = list(whole.reduction.sums)
    flat = torch.cat([whole.reduction.sums[name] for name in names])
    total = executor.sum_parts([torch.cat([p.reduction.sums[n] for n in names]) for p in mine], len(notes), flat)
    sizes = [len(whole.reduction.sums[name]) for name in names]
    whole.reduction.sums = dict(zip(names, torch.split(total, sizes), strict=True))
    for part in mine:
        whole.staged |= part.staged
    return whole


def drift_of(
    whole: PartialRound, mine: Sequence[PartialRound], notes: Sequence[Any], executor: Executor
) -> dict[str, float | None]:
    """The drift of the joined round. Between processes only scalars travel, except for the second moments."""
    counts = {name: sum(note["drift"][name] for note in notes) for name in notes[0]["drift"]}
    if (updates := whole.drift.updates) is None:
        mean_update = whole.reduction.sums["d"] / whole.reduction.counts["weight"]
    else:
        parts = [part.drift.updates for part in mine if part.drift.updates is not None]
        mean_update = executor.sum_parts(parts, len(notes), updates) / counts["clients"]
    _, gathered = executor.together(
        lambda: (None, [part.drift.along(mean_update) for part in mine]), lambda rank: "measuring the clients' drift"
    )
    spread, empty = None, whole.drift.moments
    if empty is not None:
        moments = [part.drift.moments for part in mine if part.drift.moments is not None]
        clients = int(counts["clients"])
        spread = executor.measure_sums(moments, len(notes), empty, lambda chunk: spread_terms(chunk, clients))
    return measures(counts, mean_update, sum(in_order(gathered, len(notes))), spread)
