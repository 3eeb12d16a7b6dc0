"""Stores the vectors that clients keep between rounds, in memory or in files.

Only the vectors of a round's clients are read and written. New vectors are first staged, and committed after the round
has succeeded.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedllm.common.errors import RunError
from fedllm.common.files import digest, link, write_tensors
from fedllm.common.tensors import State

if TYPE_CHECKING:
    from fedllm.federation.turns import Turn


@dataclass(frozen=True)
class VectorFile:
    """One client's vectors {name: [d]} in a safetensors file that never changes. sha256: of the file."""

    path: Path
    sha256: str

    def load(self) -> State:
        """The vectors. Raises RunError if the file is damaged."""
        try:
            if digest(self.path) != self.sha256:
                raise ValueError("it does not match its digest")
            return load_file(self.path)
        except (OSError, ValueError, SafetensorError) as error:
            raise RunError(f"{self.path}: the vectors of a client cannot be read ({error})") from error

    def nbytes(self) -> int:
        """Bytes of the vectors, without the file's header."""
        with self.path.open("rb") as file:
            return self.path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


ClientVectors = State | VectorFile  # of one client


class ClientStore:
    """Vectors {name: [d]} of each client, on the CPU, created when a client is first written.

    initial(count): rows {name: [count, d]} of clients that were never written.
    """

    def __init__(self, initial: Callable[[int], State]) -> None:
        self._initial = initial
        self._vectors: dict[int, ClientVectors] = {}
        self._elsewhere: set[int] = set()  # clients whose newest vectors only another process has
        self._turn: Turn | None = None

    def in_turn(self, turn: Turn) -> Self:
        """The same store, of which `get` reads and `stage` changes the turn's coordinates alone. Both stores hold the
        same vectors."""
        seen = copy.copy(self)
        seen._turn = turn
        return seen

    def get(self, clients: Sequence[int], device: torch.device | str = "cpu") -> State:
        """Rows {name: [C, d]} of these clients, on `device`."""
        state = self._whole(clients)
        state = state if self._turn is None else self._turn.take_all(state)
        return {name: value.to(device) for name, value in state.items()}

    def _whole(self, clients: Sequence[int]) -> State:
        state = self._initial(len(clients))
        for row, client in enumerate(clients):
            for name, value in self.vectors(client).items():
                state[name][row] = value
        return state

    def vectors(self, client: int) -> State:
        """One client's vectors {name: [d]}; empty for one that was never written."""
        if client in self._elsewhere:
            raise RuntimeError(f"client {client}: another process has its vectors, and they were not fetched")
        found = self._vectors.get(client, {})
        return found.load() if isinstance(found, VectorFile) else found

    def stage(self, clients: Sequence[int], rows: State) -> dict[int, ClientVectors]:
        """Puts aside new rows {name: [C, d]} of these clients, for `commit`."""
        rows = {name: value.detach().cpu() for name, value in rows.items()}
        if self._turn is not None:
            rows = self._turn.put_all(self._whole(clients), rows)
        return {
            client: self._set_aside(client, {name: value[row] for name, value in rows.items()})
            for row, client in enumerate(clients)
            if rows
        }

    def commit(self, staged: Mapping[int, ClientVectors]) -> None:
        """Replaces the vectors of these clients."""
        self._elsewhere -= staged.keys()
        self._vectors |= staged

    def discard(self, staged: Mapping[int, ClientVectors]) -> None:
        """Drops vectors that were staged and are not to be committed."""

    def put(self, clients: Sequence[int], rows: State) -> None:
        """Stages and commits rows {name: [C, d]} of these clients."""
        self.commit(self.stage(clients, rows))

    def forget(self, clients: Iterable[int]) -> None:
        """Drops the vectors of these clients, because another process has newer ones."""
        for client in clients:
            self._elsewhere.add(client)
            self._vectors.pop(client, None)

    def known(self) -> dict[int, ClientVectors]:
        """The clients whose vectors were written and are in this process, in order."""
        return dict(sorted(self._vectors.items()))

    def nbytes(self) -> int:
        """Bytes of all vectors in this process."""
        return sum(
            found.nbytes() if isinstance(found, VectorFile) else sum(value.nbytes for value in found.values())
            for found in self._vectors.values()
        )

    def _set_aside(self, client: int, vectors: State) -> ClientVectors:
        return {name: value.clone() for name, value in vectors.items()}


class ClientFiles(ClientStore):
    """The same with one file per client in `folder`, which exists: memory holds only the clients being trained.

    A file is written once, under a name that is never used again, so that checkpoints may link it and other processes
    read it.
    """

    def __init__(self, initial: Callable[[int], State], folder: Path) -> None:
        super().__init__(initial)
        self.folder = folder

    def commit(self, staged: Mapping[int, ClientVectors]) -> None:
        """Writes a file per client into this folder, links files of other folders, and removes the previous files."""
        for client, vectors in staged.items():
            previous = self._vectors.get(client)
            super().commit({client: self._in_folder(client, vectors)})
            if isinstance(previous, VectorFile):
                previous.path.unlink(missing_ok=True)

    def discard(self, staged: Mapping[int, ClientVectors]) -> None:
        """Removes the files of vectors that are not to be committed."""
        for vectors in staged.values():
            if isinstance(vectors, VectorFile):
                vectors.path.unlink(missing_ok=True)

    def forget(self, clients: Iterable[int]) -> None:
        """Drops the vectors of these clients and removes their files."""
        for client in clients:
            previous = self._vectors.get(client)
            super().forget([client])
            if isinstance(previous, VectorFile):
                previous.path.unlink(missing_ok=True)

    def _in_folder(self, client: int, vectors: ClientVectors) -> VectorFile:
        if not isinstance(vectors, VectorFile):
            return self._set_aside(client, vectors)
        if vectors.path.parent == self.folder:
            return vectors
        here = self._new(client)
        link(vectors.path, here)
        return VectorFile(here, vectors.sha256)

    def _set_aside(self, client: int, vectors: State) -> VectorFile:
        path = self._new(client)
        try:
            return VectorFile(path, write_tensors(path, vectors))
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise RunError(
                f"{path}: the vectors of client {client} could not be written: {error}; make room"
            ) from error

    def _new(self, client: int) -> Path:
        return self.folder / f"{client}-{uuid.uuid4().hex}.safetensors"
