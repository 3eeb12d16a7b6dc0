"""The interface of a reduction: what becomes of the accepted uploads of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fedllm.aggregation.uploads import Uploads
from fedllm.algorithms.base import Reduced, Rows

SumParts = Callable[[list[Tensor], Tensor], Tensor]
"""sum_parts(mine, like): the sum of all parts of a round, in their order, of which this process has `mine`."""


Block = tuple[Sequence[int], Tensor]
"""Clients, and a row of one vector [C, n] for each."""


def joined_rows(order: Sequence[int], parts: Sequence[Sequence[Block]], like: Tensor, sum_parts: SumParts) -> Tensor:
    """The rows [S, n] of the clients of `order`, of all parts of a round. Each row has its own place in the sum of the
    parts, and zeros in the other parts.

    parts: what each of this process's parts has. like [0, n]: dtype and device of the rows.
    """
    place = {client: row for row, client in enumerate(order)}
    placed = []
    for part in parts:
        placed.append(like.new_zeros(len(order), like.shape[1]))
        for clients, rows in part:
            placed[-1][[place[client] for client in clients]] = rows
    return sum_parts(placed, like.new_zeros(len(order), like.shape[1]))


class Reduction(Protocol):
    """Takes the accepted uploads of some of a round's clients, is joined with those of the others, and gives a result.

    add and note in each process, add_note and join for the whole round, then settle, then the rest.
    """

    @property
    def clients(self) -> int:
        """The number of clients whose uploads count; after `settle` without those that were left out."""

    def add(self, uploads: Uploads, rows: Rows, accepted: list[int], weights: Tensor) -> None:
        """Adds the accepted rows of some clients' uploads. weights [len(accepted)]: for means only."""

    def note(self) -> Any:
        """Everything except the vectors, as plain data for the other processes."""

    def add_note(self, note: Any) -> None:
        """Adds what `note` gave for a part of the round."""

    def join(self, parts: Sequence[Any], sum_parts: SumParts) -> None:
        """Takes the vectors of all parts, after all their notes. parts: the reductions of this process's parts."""

    def settle(self, rejected: int) -> dict[int, str]:
        """The clients that are left out of the result whole, each with the reason. May be called again.

        rejected: the number of clients whose uploads were rejected before. Raises RunError for too few clients.
        """

    def mean_update(self) -> Tensor:
        """The update [d] (float64) that stands for all clients. For algorithms that send d."""

    def result(self) -> Reduced:
        """The means and totals, in x's dtype."""
