"""The whole state of a federation between rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fedllm.common.tensors import State
from fedllm.federation.client_states import ClientFiles, ClientStore
from fedllm.federation.setup import BUFFERS, PERSONAL, Setup
from fedllm.federation.turns import Turn
from fedllm.problems import checks


@dataclass
class FederationState:
    """The state after `round` rounds: the global x [d], the server's vectors, and the clients' vectors.

    buffers [b]: the server's, see problems.base.Buffers; None for a problem without them.
    """

    round: int
    x: Tensor
    server: State
    clients: ClientStore
    buffers: Tensor | None = None

    def in_turn(self, turn: Turn) -> FederationState:
        """The state of a turn's coordinates, with the same store of clients."""
        x, server = turn.take(self.x), turn.take_all(self.server)
        return replace(self, x=x, server=server, clients=self.clients.in_turn(turn))

    def put_turn(self, turn: Turn, part: FederationState) -> None:
        """Takes over a turn's coordinates, and the round, from the state after it."""
        self.x, self.server = turn.put(self.x, part.x), turn.put_all(self.server, part.server)
        self.round = part.round


def blank(setup: Setup, x0: Tensor | None = None, folder: Path | None = None) -> FederationState:
    """The state before the first round, every vector at its plain initial value.

    x0 [d]: the start, default problem.initial(). folder: where the clients' vectors are kept in files, default in
    memory.
    """
    alg, info, buffers = setup.algorithm, setup.info, setup.problem.buffers
    x = checks.start(setup.problem, x0)
    x_cpu = x.cpu()

    def initial(count: int) -> State:
        vectors = alg.init_clients(x_cpu.expand(count, -1), info)
        if (places := setup.problem.personal) is not None:
            vectors = {**vectors, PERSONAL: x_cpu[places.cpu()].repeat(count, 1)}
        if buffers is None or not buffers.local:
            return vectors
        return {**vectors, BUFFERS: buffers.initial.to(x_cpu).repeat(count, 1)}

    store = ClientStore(initial) if folder is None else ClientFiles(initial, folder)
    first = None if buffers is None else buffers.initial.detach().to(x, copy=True)
    return FederationState(0, x, alg.init_server(x, info), store, first)
