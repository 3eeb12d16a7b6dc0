"""Per-client vectors between rounds, touched only for the clients of a round: in memory, or in files of their own.

What a client keeps is first staged, then committed once its whole round has succeeded.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedllm.algorithms.base import State
from fedllm.errors import RunError
from fedllm.files import digest, link, write_tensors


@dataclass(frozen=True)
class Stored:
    """One client's vectors {name: [d]} in a safetensors file that nobody changes. sha256: the file's."""

    path: Path
    sha256: str

    def load(self) -> State:
        """The vectors. RunError where the file is not what was written."""
        try:
            if digest(self.path) != self.sha256:
                raise ValueError("it is not what was written")
            return load_file(self.path)
        except (OSError, ValueError, SafetensorError) as error:
            raise RunError(
                f"{self.path}: the vectors of a client cannot be read ({error}). The last checkpoint is intact: the "
                f"same command goes on from it"
            ) from error

    def nbytes(self) -> int:
        """Bytes of the vectors, without the file's header."""
        with self.path.open("rb") as file:
            return self.path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


Kept = State | Stored  # what is known of one client


class ClientStore:
    """Vectors {name: [d]} of each client, on the CPU, created when a client is first written.

    initial(count): rows {name: [count, d]} of clients that were never written.
    """

    def __init__(self, initial: Callable[[int], State]) -> None:
        self._initial = initial
        self._kept: dict[int, Kept] = {}

    def get(self, clients: Sequence[int], device: torch.device | str = "cpu") -> State:
        """Rows {name: [C, d]} of these clients, on `device`."""
        state = self._initial(len(clients))
        for row, client in enumerate(clients):
            for name, value in self._vectors(client).items():
                state[name][row] = value
        return {name: value.to(device) for name, value in state.items()}

    def stage(self, clients: Sequence[int], rows: State) -> dict[int, Kept]:
        """Rows {name: [C, d]} of these clients put aside, for `commit`, or for that of another process's store."""
        rows = {name: value.detach().cpu() for name, value in rows.items()}
        return {
            client: self._set_aside(client, {name: value[row] for name, value in rows.items()})
            for row, client in enumerate(clients)
            if rows
        }

    def commit(self, staged: Mapping[int, Kept]) -> None:
        """From now on these are what is known."""
        self._kept |= staged

    def put(self, clients: Sequence[int], rows: State) -> None:
        """Keeps rows {name: [C, d]} of these clients."""
        self.commit(self.stage(clients, rows))

    def known(self) -> dict[int, Kept]:
        """The clients ever written, in order, with what is kept of each."""
        return dict(sorted(self._kept.items()))

    def nbytes(self) -> int:
        """Bytes of all vectors."""
        return sum(
            kept.nbytes() if isinstance(kept, Stored) else sum(value.nbytes for value in kept.values())
            for kept in self._kept.values()
        )

    def _set_aside(self, client: int, vectors: State) -> Kept:
        return {name: value.clone() for name, value in vectors.items()}

    def _vectors(self, client: int) -> State:
        kept = self._kept.get(client, {})
        return kept.load() if isinstance(kept, Stored) else kept


class ClientFiles(ClientStore):
    """The same with a file for each client, in `folder`, which exists: memory holds the clients at work and no others.

    A file is written once, under a name that never comes again, so that checkpoints may link it and other processes
    read it.
    """

    def __init__(self, initial: Callable[[int], State], folder: Path) -> None:
        super().__init__(initial)
        self.folder = folder

    def commit(self, staged: Mapping[int, Kept]) -> None:
        """Vectors get files here, and so do files that lie elsewhere; files of before are removed."""
        for client, kept in staged.items():
            before = self._kept.get(client)
            self._kept[client] = self._at_home(client, kept)
            if isinstance(before, Stored):
                before.path.unlink(missing_ok=True)

    def _at_home(self, client: int, kept: Kept) -> Stored:
        if not isinstance(kept, Stored):
            return self._set_aside(client, kept)
        if kept.path.parent == self.folder:
            return kept
        home = self._new(client)
        link(kept.path, home)
        return Stored(home, kept.sha256)

    def _set_aside(self, client: int, vectors: State) -> Stored:
        path = self._new(client)
        try:
            return Stored(path, write_tensors(path, vectors))
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise RunError(
                f"{path}: the vectors of client {client} could not be written: {error}; the last checkpoint is intact. "
                f"Make room and start the same command again"
            ) from error

    def _new(self, client: int) -> Path:
        return self.folder / f"{client}-{uuid.uuid4().hex}.safetensors"


def pack_kept(kept: Mapping[int, Kept], *, by_name: bool = True) -> tuple[list[tuple[int, str, str]], State]:
    """What clients keep as JSON data and tensors, for another process. by_name: whether it reaches the files too."""
    files: list[tuple[int, str, str]] = []
    tensors: State = {}
    for client, one in kept.items():
        if isinstance(one, Stored) and by_name:
            files.append((client, str(one.path), one.sha256))
        else:
            vectors = one.load() if isinstance(one, Stored) else one
            tensors |= {f"client/{client}/{name}": value for name, value in vectors.items()}
    return files, tensors


def unpack_kept(files: list[tuple[int, str, str]], tensors: State) -> dict[int, Kept]:
    """What another process packed, perhaps among other tensors."""
    kept: dict[int, Kept] = {client: Stored(Path(path), sha256) for client, path, sha256 in files}
    for key, value in tensors.items():
        if key.startswith("client/"):
            _, client, name = key.split("/", 2)
            vectors = kept.setdefault(int(client), {})
            assert isinstance(vectors, dict)
            vectors[name] = value
    return kept
