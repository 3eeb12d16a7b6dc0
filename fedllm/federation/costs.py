"""What federated training costs: bytes, simulated run time, client memory (GC, sec. 6, App. I and Table 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedllm.aggregation.downloads import travel_dtype
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, Vectors, values
from fedllm.blocks import BlockPartition
from fedllm.common.tensors import State
from fedllm.federation.setup import Setup
from fedllm.problems.base import Buffers


@dataclass(frozen=True)
class Traffic:
    """What one round sends. *_values: numbers each way by one client; tracked_values: those that only tracked clients
    add to what they send up."""

    down_values: int
    up_values: int
    tracked_values: int
    sampled: int
    tracked: int
    value_bytes: int = 4

    @property
    def bytes_down(self) -> int:
        """Bytes from the server to all S clients."""
        return self.value_bytes * self.sampled * self.down_values

    @property
    def bytes_up(self) -> int:
        """Bytes from all clients to the server."""
        return self.value_bytes * (self.sampled * self.up_values + self.tracked * self.tracked_values)

    @property
    def client_bytes(self) -> int:
        """Bytes over the link of a client with the most to send."""
        return self.value_bytes * (self.down_values + self.up_values + (self.tracked_values if self.tracked else 0))


def _values(vectors: Vectors, info: RoundInfo, dim: int) -> int:
    return sum(values(of, dim, info.blocks.num_blocks) for of in vectors.values())


def traffic(
    alg: Algorithm, info: RoundInfo, dim: int, value_bytes: int = 4, *, buffers: Buffers | None = None
) -> Traffic:
    """What a round of `alg` sends: x and the algorithm's downloads to S clients, its uploads back.

    buffers: the problem's, which are sent up and, unless clients go on from their own, down.
    """
    beside = 0 if buffers is None else len(buffers.initial)
    return Traffic(
        down_values=dim + _values(alg.downloads(), info, dim) + (0 if buffers is None or buffers.local else beside),
        up_values=_values(alg.uploads(), info, dim) + beside,
        tracked_values=_values(alg.tracked_uploads(), info, dim),
        sampled=info.sampled,
        tracked=info.tracked,
        value_bytes=value_bytes,
    )


def round_bytes(setup: Setup, x: Tensor) -> tuple[int, int]:
    """Bytes that all clients of a round send, and receive, in the formats of the settings. x [d]: any.

    Where rounds take turns: the mean over the turns."""
    if setup.turns:
        each = [round_bytes(setup.in_turn(turn, x), turn.take(x)) for turn in setup.turns]
        count = len(each)
        others = (count - 1) * len(x) * travel_dtype(x.dtype, setup.downloads).itemsize * setup.info.sampled
        return sum(up for up, _ in each) // count, (sum(down for _, down in each) + others) // count
    info, declared, buffers = setup.info, setup.declared(x), setup.problem.buffers
    times = {name: info.tracked if name in declared.tracked else info.sampled for name in declared.sent}
    up = sum(
        times[name] * setup.pipeline.bytes(name, size, x.itemsize, declared) for name, size in declared.sent.items()
    )
    numbers = len(x) + _values(setup.algorithm.downloads(), info, len(x))
    down = numbers * travel_dtype(x.dtype, setup.downloads).itemsize
    if buffers is not None and not buffers.local:
        down += len(buffers.initial) * x.itemsize
    return up, info.sampled * down


def vectors_per_round(
    alg: Algorithm, info: RoundInfo, dim: int, *, derive: bool = False, equal_steps: bool = True
) -> float:
    """V(t): model-sized vectors a sampled client moves in a round, both ways, the tracked share counted as T/S.

    FedAvg 2; FAdamGC, FA-NT and SCAFFOLD 3 + T/S, because y goes down to all S and its change goes up from T, as GC
    counts (Table 7 over Table 2: 3.5 at T = S/2). derive: without the vectors that need not be sent because both sides
    can compute them from the last x, such as FedAdamW's Delta, or FA-NT's y if S = T = N and eta_g = 1: then 2.
    equal_steps: whether all clients take info.local_steps steps. Where rounds take turns, clients receive all of x, and
    of the other vectors the turn's part.
    """
    derived = alg.computable(info, equal_steps) if derive and info.turns == 1 else ()

    def sent(vectors: Vectors) -> int:
        return _values({name: of for name, of in vectors.items() if name not in derived}, info, dim)

    moved = sent(alg.downloads()) + _values(alg.uploads(), info, dim)
    moved_by_tracked = sent(alg.tracked_uploads()) * info.tracked / info.sampled
    return (dim + (moved + moved_by_tracked) / info.turns) / dim


def simulated_seconds(compute_seconds: float, client_bytes: int, bandwidth_mbit: float) -> float:
    """SRT of one round (GC, sec. 6): compute time of the slowest client, and its bytes over a link."""
    return compute_seconds + client_bytes * 8 / (bandwidth_mbit * 1e6)


def client_memory(alg: Algorithm, info: RoundInfo, dim: int, frozen: int) -> dict[str, int]:
    """Numbers a client holds while it trains: frozen weights, x, gradient, each vector of its local state, and what it
    receives and stores. frozen: weights of the base model. `Algorithm.held_vectors` has the count of GC, Table 6."""
    x = torch.zeros(1, dim)
    kept = alg.init_clients(x, info)
    server = alg.init_server(x[0], info)
    local = alg.begin(x, server, kept, info)
    ours = {value.data_ptr() for value in server.values()}  # what is only a view of something received counts there
    moments = {n: value.numel() for n, value in local.items() if n != "x" and value.data_ptr() not in ours}
    received = {f"received {name}": values(of, dim, info.blocks.num_blocks) for name, of in alg.downloads().items()}
    stored = {f"kept {name}": value.numel() for name, value in kept.items()}
    return {"frozen weights": frozen, "x": dim, "received x": dim, "gradient": dim, **moments, **received, **stored}


def stored_values(alg: Algorithm, info: RoundInfo, dim: int) -> int:
    """Numbers a client keeps between rounds."""
    return _values(alg.client_vectors(), info, dim)


def row_vectors(alg: Algorithm) -> dict[str, int]:
    """How many float32 matrices [C, d] are held for C clients together: in a step, and while uploads are reduced.

    step: the local state, what the clients brought, the gradient, and two temporaries of the step. reduce: the local
    state, uploads and kept rows that are not the local ones, and for one upload at a time the accepted rows, their
    float64 and its weighted copy.
    """
    info = RoundInfo(0, 1, 1, 1, 1, 1, BlockPartition.elementwise(1))
    x, one = torch.zeros(1, 1), torch.ones(1, 1)
    server, kept = alg.init_server(x[0], info), alg.init_clients(x, info)
    local = alg.begin(x, server, kept, info)
    eta = alg.rates(torch.ones(1), info).to(x)
    alg.step(local, x.clone(), 1, eta, info)
    upload, state = alg.end(local, x, server, kept, Rows(one, eta, one.bool()), info)
    return {"step": _count(local) + _count(kept) + 3, "reduce": _count(local | upload | state) + 5}


def _count(state: State) -> int:
    return len({value.data_ptr() for value in state.values()})
