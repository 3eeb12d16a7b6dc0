"""Per-client vectors between rounds: one small separate store, touched only for the clients of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedllm.algorithms.base import State


class ClientStore:
    """Vectors {name: [d]} of each client, on the CPU, created when a client is first written.

    initial(count): rows {name: [count, d]} of clients that were never written. changed: clients written since the
    last checkpoint.
    """

    def __init__(self, initial: Callable[[int], State]) -> None:
        self._initial = initial
        self._rows: dict[int, State] = {}
        self.changed: set[int] = set()

    def get(self, clients: Sequence[int], device: torch.device | str = "cpu") -> State:
        """Rows {name: [C, d]} of these clients, on `device`."""
        state = self._initial(len(clients))
        for row, client in enumerate(clients):
            for name, value in self._rows.get(int(client), {}).items():
                state[name][row] = value
        return {name: value.to(device) for name, value in state.items()}

    def put(self, clients: Sequence[int], rows: State) -> None:
        """Keeps rows {name: [C, d]} of these clients."""
        if not rows:
            return
        rows = {name: value.detach().cpu() for name, value in rows.items()}
        for row, client in enumerate(clients):
            self._rows[int(client)] = {name: value[row].clone() for name, value in rows.items()}
            self.changed.add(int(client))

    def known(self) -> dict[int, State]:
        """The clients ever written, in order, with their vectors {name: [d]}."""
        return dict(sorted(self._rows.items()))

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for state in self._rows.values() for value in state.values())
