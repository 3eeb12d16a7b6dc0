"""Who computes the parts of a round: this process alone, or several that run the same program.

A round's clients are dealt into parts. Every process computes the parts that are its own; at the end of a round all
processes hold the same sums, added in the order of the parts, whoever computed them. So results depend on the parts and
not on the number of processes. `distributed.collectives` does this over several processes.
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
CHUNK = 65_536  # coordinates that are measured at once, on whichever process: see measure_sums


class Executor:
    """One process, which computes everything. rank: its number. size: how many processes there are.

    bytes_received: by this process from the others so far, as payload, without the transport's own headers.
    """

    rank = 0
    size = 1
    bytes_received = 0

    def own(self, parts: Sequence[T]) -> Sequence[T]:
        """The parts that this process computes: number rank, rank + size, ..."""
        return parts[self.rank :: self.size]

    def on_first(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, the only process that does it; plain data that all processes then know.

        An error of it is raised in every process.
        """
        return work()

    def together(self, work: Callable[[], tuple[T, Note]], doing: Callable[[int], str]) -> tuple[T, list[Note]]:
        """Every process does `work`: what it returned here, and the notes of all processes in the order of their ranks.

        doing(rank): what that process is doing, for errors. Raises what `work` raises here; where another process fails
        or is lost, RunError or UserError with its number, what it was doing, and its message.
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
        """The sum over runs of CHUNK coordinates of `measure` of the summed parts there.

        mine: parts [k, n], as `like`. measure: [k, at most CHUNK] -> [m]. Of several processes each sums and measures
        some of the runs, so that no summed vector travels, only its measures.
        """
        total = self.sum_parts(mine, count, like)
        return add_in_order([measure(chunk) for chunk in torch.split(total, CHUNK, dim=1)])

    def share_folder(self, folder: Path) -> Path:
        """The folder for the files of clients' vectors, which exists: `folder`, or one of this process's own where it
        does not reach that one."""
        return folder

    def from_first(self, tensors: State) -> State:
        """Rank 0's values of these tensors, which all processes have by the same names, shapes and dtypes."""
        return tensors

    def fetch(self, store: ClientStore, needed: Mapping[int, int] | None = None) -> None:
        """Brings the vectors of clients to where they are needed.

        needed: client -> the rank that needs them; None: rank 0 needs all.
        """

    def publish(self, store: ClientStore, mine: Mapping[int, ClientVectors], notes: Sequence[Note]) -> None:
        """Commits what clients keep; the stores of all processes then know who has which client's vectors.

        mine: of the clients that this process trained. notes: what `describe` gave in each process, by rank.
        """
        store.commit(mine)


def add_in_order(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the terms, one after the other."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def describe(mine: Mapping[int, ClientVectors]) -> Note:
    """What others must know of clients' vectors: (client, file name or None, sha256 or None) each."""
    return [
        (client, vectors.path.name, vectors.sha256) if isinstance(vectors, VectorFile) else (client, None, None)
        for client, vectors in mine.items()
    ]
