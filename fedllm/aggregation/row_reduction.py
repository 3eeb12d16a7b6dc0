"""Reduces the uploads of a round by a robust rule, which needs every client's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedllm.aggregation import robust
from fedllm.aggregation.base import SumParts, joined_rows
from fedllm.aggregation.settings import RobustSettings
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Rows
from fedllm.common.errors import RunError
from fedllm.common.tensors import State

_RATES = "rate_sum"  # the column of the clients' sums of rates, beside their vectors


class RowReduction:
    """Keeps each accepted client's row, sorted by client, so that the order in which they come leaves no trace.

    `norm` and multi_krum leave out whole clients. The other rules take a number from each coordinate. A client that was
    rejected before is one of the faulty ones: the rule then runs with so many fewer.
    """

    def __init__(
        self, settings: RobustSettings, alg: Algorithm, declared: Declared, info: RoundInfo, device: torch.device
    ) -> None:
        self._settings, self._round = settings, info.index
        self._tracked_names, self._dtype = list(alg.tracked_uploads()), declared.dtype
        self._lengths, self._device = dict(declared.sent), device
        self._facts: dict[int, tuple[float, bool]] = {}  # client -> its sum of rates, and whether it is tracked
        self._blocks: list[tuple[list[int], State]] = []  # clients, and their rows
        self._out: dict[int, str] = {}
        self._faulty = settings.faulty or 0
        self._reduced: State = {}  # what the rule has made of the rows

    @property
    def clients(self) -> int:
        """The number of clients that count; after `settle` without those that were left out."""
        return len(self._facts) - len(self._out)

    def add(self, uploads: Uploads, rows: Rows, accepted: list[int], weights: Tensor) -> None:
        """Keeps the accepted rows. The weights are not used: robust rules have none."""
        clients = [uploads.clients[row] for row in accepted]
        self._blocks.append((clients, {name: uploads.sent[name][accepted] for name in self._lengths}))
        rates, tracked = rows.rate_sum[accepted, 0].double().tolist(), rows.tracked[accepted, 0].tolist()
        self._facts |= {client: (rate, here) for client, rate, here in zip(clients, rates, tracked, strict=True)}

    def note(self) -> Any:
        """The facts of the clients, as plain data."""
        return [(client, *fact) for client, fact in self._facts.items()]

    def add_note(self, note: Any) -> None:
        """Adds the facts of another part's clients."""
        self._facts |= {client: (rate, tracked) for client, rate, tracked in note}

    def join(self, parts: Sequence[RowReduction], sum_parts: SumParts) -> None:
        """Takes the rows of all parts."""
        order = sorted(self._facts)
        joined: State = {}
        for name, empty in self._empty().items():
            blocks = [[(clients, rows[name]) for clients, rows in part._blocks] for part in parts]
            joined[name] = joined_rows(order, blocks, empty, sum_parts)
        self._blocks = [(order, joined)]

    def _empty(self) -> State:
        """No row {name: [0, n]} of each vector."""
        return {n: torch.zeros(0, size, dtype=self._dtype, device=self._device) for n, size in self._lengths.items()}

    def settle(self, rejected: int) -> dict[int, str]:
        """The clients that `robust.norm` and multi_krum leave out, with the reasons."""
        order, rows = self._sorted()
        self._reduced = {}
        self._out = self._too_long(order, rows)
        faulty = max(0, (self._settings.faulty or 0) - rejected - len(self._out))
        self._faulty = faulty
        near = [row for row, client in enumerate(order) if client not in self._out]
        if faulty and len(near) < (least := self._settings.least(faulty)):
            raise RunError(
                f"round {self._round + 1}: {len(near)} accepted uploads, robust.rule={self._settings.rule} with "
                f"{faulty} faulty ones among them needs {least}; lower robust.faulty or wait for more clients"
            )
        if faulty and self._settings.rule == "multi_krum":
            scores = robust.krum_scores(robust.distances({n: v[near] for n, v in rows.items()}, faulty), faulty)
            kept, middle = robust.multi_krum(scores, faulty), float(scores.median())
            self._out |= {
                order[near[row]]: f"robust.rule multi_krum: one of the {faulty} updates least like the others (score "
                f"{float(scores[row]):.3g}, the median is {middle:.3g})"
                for row in range(len(near))
                if row not in kept
            }
        return dict(self._out)

    def _too_long(self, order: list[int], rows: State) -> dict[int, str]:
        """The clients one of whose vectors is longer than `norm` times the median, of those that sent it."""
        found: dict[int, str] = {}
        if (most := self._settings.norm) is None:
            return found
        for name, value in rows.items():
            senders = [r for r, c in enumerate(order) if name not in self._tracked_names or self._facts[c][1]]
            norms = torch.linalg.vector_norm(value[senders], dim=1, dtype=torch.float64)
            if not senders or (middle := float(robust.median(norms[:, None]))) == 0:
                continue
            for row, norm in zip(senders, norms.tolist(), strict=True):
                if norm > most * middle:
                    text = (
                        f"robust.norm: the norm of '{name}' is {norm:.3g}, above {most:g} times the median {middle:.3g}"
                    )
                    found.setdefault(order[row], text)
        return found

    def mean_update(self) -> Tensor:
        """What the rule makes of the updates [d] (float64)."""
        return self._reduce()["d"]

    def result(self) -> Reduced:
        """What the rule makes of each vector and of the sums of rates, and the totals of tracked vectors."""
        found = self._reduce()
        kept, rows = self._kept()
        tracked = [row for row, client in enumerate(kept) if self._facts[client][1]]
        total = {name: rows[name][tracked].double().sum(0).to(self._dtype) for name in self._tracked_names}
        mean = {name: found[name].to(self._dtype) for name in self._lengths if name not in self._tracked_names}
        return Reduced(mean, total, float(found[_RATES]), len(kept), len(tracked))

    def _reduce(self) -> State:
        """What the rule makes of each vector but the tracked ones, and of the sums of rates; computed once."""
        if self._reduced:
            return self._reduced
        kept, rows = self._kept()
        wanted = {name: value for name, value in rows.items() if name not in self._tracked_names}
        rates = [[self._facts[client][0]] for client in kept]
        wanted[_RATES] = torch.tensor(rates, dtype=torch.float64, device=self._device)
        rule, faulty = self._settings.rule, self._faulty
        apart = robust.distances(rows, faulty) if rule == "nnm_trimmed_mean" else None
        for name, value in wanted.items():
            if apart is not None:
                self._reduced[name] = robust.nnm_trimmed_mean(value, apart, faulty)
            elif rule == "median":
                self._reduced[name] = robust.median(value)
            elif rule == "trimmed_mean":
                self._reduced[name] = robust.trimmed_mean(value, faulty)
            else:
                self._reduced[name] = robust.mean(value)
        return self._reduced

    def _kept(self) -> tuple[list[int], State]:
        """The clients that count, and their rows."""
        order, rows = self._sorted()
        kept = [row for row, client in enumerate(order) if client not in self._out]
        return [order[row] for row in kept], {name: value[kept] for name, value in rows.items()}

    def _sorted(self) -> tuple[list[int], State]:
        """All clients in order, and their rows {name: [S, n]}."""
        clients = [client for some, _ in self._blocks for client in some]
        if len(self._blocks) != 1 or clients != sorted(clients):
            places = sorted(range(len(clients)), key=lambda place: clients[place])
            rows = {
                n: torch.cat([none, *(of[n] for _, of in self._blocks)])[places] for n, none in self._empty().items()
            }
            clients = sorted(clients)
            self._blocks = [(clients, rows)]
        return self._blocks[0]
