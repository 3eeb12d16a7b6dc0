"""One round: divide the sampled clients into parts, train this process's parts, join all parts, aggregate, commit.

This module knows no model and no equation of an algorithm. Several processes run it at the same time. Seed and round
determine what each of them computes, and the order in which the results are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedllm.aggregation.downloads import as_read, encode, travel_dtype
from fedllm.aggregation.product_gap import Product
from fedllm.aggregation.reduction import aggregate, require_enough
from fedllm.aggregation.settings import EXACT
from fedllm.common.profiling import section
from fedllm.federation.client_states import ClientVectors
from fedllm.federation.executor import Executor, Note, describe
from fedllm.federation.local_training import Trainer, full_gradients, local_steps, train_part, train_together
from fedllm.federation.partial_round import PartialRound, drift_of, gap_of, in_order, join, sum_parts
from fedllm.federation.sampling import deal
from fedllm.federation.setup import BUFFERS, Setup
from fedllm.federation.state import FederationState, blank
from fedllm.federation.turns import Turn
from fedllm.problems import checks


@dataclass(frozen=True)
class Plan:
    """How a round is computed. It changes results by rounding at most.

    stacked_clients: clients trained together, None = all of a part; fewer if memory runs out (see HalvingBatches).
    min_clients: accepted uploads below which the run stops. progress(done, total): called after each local step, in
    client-steps of this process. parts: the number of parts into which the clients are divided by their work; their
    sums are added in the order of the parts. executor: the processes that compute them; their number changes nothing.
    products: those whose gap is measured in this round, see product_gap. trainer: see train_part.
    """

    stacked_clients: int | None = None
    min_clients: int = 1
    progress: Callable[[int, int], None] = lambda done, total: None
    parts: int = 1
    executor: Executor = field(default_factory=Executor)
    products: Sequence[Product] = ()
    trainer: Trainer = train_together


@dataclass(frozen=True)
class RoundReport:
    """The numbers of a round.

    train_loss: the mean over the accepted clients of the mean loss of their steps, or None. rejected: client -> reason.
    most_steps: local steps of the client that takes the most. bytes_up, bytes_down: of all tensors sent, also of
    rejected uploads. client_bytes: both ways, of the client that sent the most. compute_seconds: of the slowest client,
    estimated from the time of the clients trained with it and its share of their steps. drift: how far the accepted
    clients differ, see drift.measures; with a robust rule D is what the rule makes of the updates, and the clients are
    also those that it leaves out. Where it is measured, also lora_gap. forced: the number of clients trained together
    after memory ran out, None if it did not. missing: of real sites, the sampled ones that have not answered; None in a
    simulation. clipped: under client-level privacy, the share of the accepted clients whose vector of that name was
    above its norm. noise_ratio: the length of the noise in D over that of D without it.
    """

    clients: list[int]
    tracked: list[int]
    train_loss: float | None
    rejected: dict[int, str]
    most_steps: int
    bytes_up: int
    bytes_down: int
    client_bytes: int
    compute_seconds: float
    drift: dict[str, float | None]
    forced: int | None = None
    missing: list[int] | None = None
    clipped: dict[str, float] | None = None
    noise_ratio: float | None = None


def start(
    setup: Setup,
    *,
    x0: Tensor | None = None,
    stacked_clients: int | None = None,
    parts: int = 1,
    executor: Executor | None = None,
    folder: Path | None = None,
) -> FederationState:
    """The state before the first round. If the algorithm needs full gradients, this makes a pass over all data.

    x0, folder: see `blank`. stacked_clients, parts, executor: see Plan.
    """
    executor = executor or Executor()
    state = blank(setup, x0, folder)
    if not setup.algorithm.needs_full_gradient():
        return state
    everyone = range(setup.problem.num_clients)
    dealt = deal(dict(zip(everyone, checks.sizes(setup.problem, everyone).tolist(), strict=True)), parts)

    def work() -> tuple[list[Tensor], Note]:
        sums: list[Tensor] = []
        for clients in executor.own(dealt):
            part, vectors = full_gradients(setup, state, clients, stacked_clients)
            sums.append(part)
            staged.update(vectors)
        return sums, describe(staged)

    staged: dict[int, ClientVectors] = {}
    mine, notes = executor.together(work, _doing("computing full gradients", dealt, executor))
    total = executor.sum_parts(mine, len(dealt), torch.zeros_like(state.x, dtype=torch.float64))
    executor.publish(state.clients, staged, notes)
    mean = (total / setup.problem.num_clients).to(state.x.dtype)
    state.server = setup.algorithm.init_server(state.x, setup.info, mean)
    return state


def run_round(
    setup: Setup,
    state: FederationState,
    clients: Sequence[int],
    tracked: Sequence[int],
    plan: Plan | None = None,
) -> RoundReport:
    """Computes one round. `state` changes only at the end, if everything has succeeded.

    A client with a faulty upload is rejected: nothing of it enters the aggregate, and its state does not change. Raises
    RunError if fewer than plan.min_clients uploads are accepted. A round without clients leaves the model as it is.
    With client-level privacy no number of uploads is too small: at least the noise is released.
    """
    plan = plan or Plan()
    setup = setup.at(state.round)
    if setup.turn is not None:
        return _round_of_turn(setup, setup.turn, state, clients, tracked, plan)
    if not clients:
        return _round_of_nobody(setup, state)
    alg, info, executor = setup.algorithm, setup.info, plan.executor
    steps = local_steps(setup.problem, clients, info)
    alg.check(info, list(steps.values()))
    parts = deal(steps, plan.parts)
    executor.fetch(state.clients, {client: n % executor.size for n, part in enumerate(parts) for client in part})

    sent, down = _sent(setup, state)

    def work() -> tuple[list[PartialRound], Note]:
        mine = _train_parts(setup, sent, [{c: steps[c] for c in part} for part in executor.own(parts)], tracked, plan)
        return mine, [part.note() for part in mine]

    doing = _doing(f"training in round {info.index + 1}", parts, executor)
    mine, gathered = executor.together(work, doing)
    notes = in_order(gathered, len(parts))
    with section("reduce"):
        whole = join(setup, state.x, mine, notes, executor)
        left_out = whole.reduction.settle(len(whole.rejected))
        dropped = whole.leave_out(left_out)
        if not setup.pipeline.private:
            require_enough(whole.reduction.clients, plan.min_clients, whole.rejected, info.index)
        reduced = whole.reduction.result()
        x, server = aggregate(alg, state.x, state.server, reduced, info)
        drift = drift_of(whole, mine, notes, executor)
        if plan.products:
            drift["lora_gap"] = gap_of(setup, state.x, whole, mine, plan.products, sum_parts(executor, len(notes)))
        kept = [[e for note in one for e in note["staged"] if e[0] not in left_out] for one in gathered]
        executor.publish(state.clients, whole.staged, kept)
        state.clients.discard(dropped)
    state.x, state.server, state.round = x, server, info.index + 1
    state.buffers = reduced.mean.get(BUFFERS)
    return RoundReport(
        clients=list(clients),
        tracked=list(tracked),
        train_loss=float(torch.tensor(whole.losses, dtype=torch.float64).mean()) if whole.losses else None,
        rejected=whole.rejected,
        most_steps=max(steps.values()),
        bytes_up=whole.bytes_up,
        bytes_down=down * len(clients),
        client_bytes=down + whole.most_up,
        compute_seconds=whole.slowest,
        drift=drift,
        forced=whole.forced,
        **whole.noised(),
    )


def _round_of_turn(
    setup: Setup, turn: Turn, state: FederationState, clients: Sequence[int], tracked: Sequence[int], plan: Plan
) -> RoundReport:
    """`run_round` on the turn's coordinates. Clients receive all of x.

    lora_gap is 0 where it is measured: the clients' products have one matrix in common."""
    read = as_read({"": state.x}, [""], setup.downloads)[""]
    part = state.in_turn(turn)
    report = run_round(setup.in_turn(turn, read), part, clients, tracked, replace(plan, products=()))
    state.put_turn(turn, part)
    others = (len(state.x) - len(part.x)) * travel_dtype(state.x.dtype, setup.downloads).itemsize
    return replace(
        report,
        bytes_down=report.bytes_down + others * len(clients),
        client_bytes=report.client_bytes + (others if clients else 0),
        drift=report.drift | ({"lora_gap": 0.0} if plan.products and clients else {}),
    )


def _sent(setup: Setup, state: FederationState) -> tuple[FederationState, int]:
    """The state as clients read it, and the bytes that one of them receives."""
    names, settings = setup.algorithm.downloads(), setup.downloads
    vectors = {"": state.x, **{name: state.server[name] for name in names}}
    down = sum(value.nbytes for value in encode(vectors, vectors, settings).values()) + _buffer_bytes(setup, state)
    if settings == EXACT:
        return state, down
    found = as_read(vectors, vectors, settings)
    return replace(state, x=found.pop(""), server=state.server | found), down


def _round_of_nobody(setup: Setup, state: FederationState) -> RoundReport:
    """A round in which Poisson sampling has drawn no client: it counts, and without privacy changes nothing."""
    if setup.pipeline.private:
        reduced = PartialRound.empty(setup, state.x).reduction.result()
        state.x, state.server = aggregate(setup.algorithm, state.x, state.server, reduced, setup.info)
    state.round = setup.info.index + 1
    return RoundReport([], [], None, {}, 0, 0, 0, 0, 0.0, {})


def _buffer_bytes(setup: Setup, state: FederationState) -> int:
    """Bytes of the buffers that the server sends a client; 0 where there are none or clients go on from their own."""
    buffers = setup.problem.buffers
    return 0 if state.buffers is None or buffers is None or buffers.local else state.buffers.nbytes


def _train_parts(
    setup: Setup, state: FederationState, parts: list[dict[int, int]], tracked: Sequence[int], plan: Plan
) -> list[PartialRound]:
    """Trains this process's parts one after the other. Each part maps clients to local steps."""
    done, total = 0, sum(sum(steps.values()) for steps in parts)

    def progress(steps: int) -> None:
        nonlocal done
        done += steps
        plan.progress(min(done, total), total)  # done > total if clients were trained again, see HalvingBatches

    found: list[PartialRound] = []
    stacked = plan.stacked_clients
    for steps in parts:
        given = (setup, state, steps, set(tracked), stacked, progress, bool(plan.products), plan.trainer)
        found.append(train_part(*given))
        stacked = found[-1].forced or stacked
    return found


def _doing(what: str, parts: Sequence[Sequence[int]], executor: Executor) -> Callable[[int], str]:
    """A function of the rank that says what that process is doing and for which clients; errors show it."""

    def describe_rank(rank: int) -> str:
        clients = sorted(client for part in parts[rank :: executor.size] for client in part)
        return f"{what}: clients {', '.join(map(str, clients))}"

    return describe_rank
