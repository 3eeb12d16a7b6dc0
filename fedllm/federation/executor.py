"""Divides the parts of a round among processes: this process alone, or several that run the same program.

The clients of a round are divided into parts. Every process computes its own parts. At the end of a round all processes
have the same sums, added in the order of the parts. So results depend on the parts and not on the number of processes.
This class is for one process; `distributed.collectives` has the executor of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedllm.common.tensors import State
from fedllm.federation.client_states import ClientStore, ClientVectors, VectorFile

T = TypeVar("T")
Note = Any  # plain data, as JSON has it
CHUNK = 65_536  # coordinates that measure_sums measures at once, for any number of processes


class Executor:
    """One process, which computes everything. rank: its number. size: the number of processes.

    bytes_received: what this process has received from the others, without headers of the transport.
    """

    rank = 0
    size = 1
    bytes_received = 0

    def own(self, parts: Sequence[T]) -> Sequence[T]:
        """The parts that this process computes: numbers rank, rank + size, ..."""
        return parts[self.rank :: self.size]

    def on_first(self, work: Callable[[], T]) -> T:
        """Calls `work` on rank 0 only, and returns its result (plain data) in every process.

        An error in `work` is raised in every process.
        """
        return work()

    def together(self, work: Callable[[], tuple[T, Note]], doing: Callable[[int], str]) -> tuple[T, list[Note]]:
        """Calls `work` in every process. Returns its result in this process, and the notes of all processes by rank.

        doing(rank): what that process is doing, for errors. Raises what `work` raises in this process. If another
        process fails or is lost: RunError or UserError with its rank, what it was doing, and its message.
        """
        result, note = work()
        return result, [note]

    def sum_parts(self, mine: Sequence[Tensor], count: int, like: Tensor) -> Tensor:
        """The sum of all `count` parts, added one after the other in their order to zeros.

        mine: this process's parts, each of the shape, dtype and device of `like`.
        """
        total = torch.zeros_like(like)
        for part in mine:
            total += part
        return total

    def measure_sums(
        self, mine: Sequence[Tensor], count: int, like: Tensor, measure: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Sums the parts, applies `measure` to CHUNK coordinates of the sum at a time, and adds up the results [m].

        mine: parts [k, n], as `like`. measure: [k, at most CHUNK] -> [m]. With several processes, each one sums and
        measures some of the chunks, so only the results travel.
        """
        total = self.sum_parts(mine, count, like)
        return add_in_order([measure(chunk) for chunk in torch.split(total, CHUNK, dim=1)])

    def share_folder(self, folder: Path) -> Path:
        """The folder for the files of clients' vectors: `folder`, or one of this process if it cannot read `folder`."""
        return folder

    def from_first(self, tensors: State) -> State:
        """Rank 0's values of these tensors. All processes have the same names, shapes and dtypes."""
        return tensors

    def fetch(self, store: ClientStore, needed: Mapping[int, int] | None = None) -> None:
        """Sends the vectors of clients to the processes that need them.

        needed: client -> the rank that needs its vectors; None: rank 0 needs all.
        """

    def publish(self, store: ClientStore, mine: Mapping[int, ClientVectors], notes: Sequence[Note]) -> None:
        """Commits the clients' new vectors. Every store then knows which process has the vectors of which client.

        mine: the vectors of the clients that this process trained. notes: the result of `describe` in each process.
        """
        store.commit(mine)


def add_in_order(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the terms, one after the other."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def describe(mine: Mapping[int, ClientVectors]) -> Note:
    """What other processes must know of clients' vectors: (client, file name or None, sha256 or None) for each."""
    return [
        (client, vectors.path.name, vectors.sha256) if isinstance(vectors, VectorFile) else (client, None, None)
        for client, vectors in mine.items()
    ]
