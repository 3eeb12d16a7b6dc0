"""The round loop: deal the sampled clients into parts, train this process's parts, join all parts, aggregate, commit.

It knows neither the insides of a model nor the equations of an algorithm. Several processes run it side by side; what
each of them computes, and in which order the results are added, follows from the seed and the round alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedllm.aggregation.reduction import aggregate, require_enough
from fedllm.common.profiling import section
from fedllm.federation.client_states import ClientVectors
from fedllm.federation.executor import Executor, Note, describe
from fedllm.federation.local_training import full_gradients, local_steps, train_part
from fedllm.federation.partial_round import PartialRound, drift_of, in_order, join
from fedllm.federation.sampling import deal
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState, blank
from fedllm.problems import checks


@dataclass(frozen=True)
class Plan:
    """How a round is computed; but for rounding, none of it changes a result.

    stacked_clients: clients trained together, None = all of a part; fewer where memory gives out (see HalvingBatches).
    min_clients: accepted uploads without which the run stops. progress(done, total): called after each local step,
    counted in this process's client-steps. parts: into how many the clients are dealt, by work; their sums are added
    in the order of the parts. executor: the processes that compute them; how many they are changes nothing.
    """

    stacked_clients: int | None = None
    min_clients: int = 1
    progress: Callable[[int, int], None] = lambda done, total: None
    parts: int = 1
    executor: Executor = field(default_factory=Executor)


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round.

    train_loss: mean over the accepted clients of their steps' mean loss, or None. rejected: client -> why.
    bytes_up, bytes_down: of the tensors sent, rejected ones included. client_bytes: both ways, by the client that sent
    the most. compute_seconds: of the slowest client, by its number of steps, of the time of the clients trained with
    it. drift: how far the accepted clients differ, see drift.measures. forced: clients trained together after memory
    gave out, None where it did not.
    """

    clients: list[int]
    tracked: list[int]
    train_loss: float | None
    rejected: dict[int, str]
    bytes_up: int
    bytes_down: int
    client_bytes: int
    compute_seconds: float
    drift: dict[str, float | None]
    forced: int | None = None


def start(
    setup: Setup,
    *,
    x0: Tensor | None = None,
    stacked_clients: int | None = None,
    parts: int = 1,
    executor: Executor | None = None,
    folder: Path | None = None,
) -> FederationState:
    """The state before the first round, after the pass over the data where the algorithm asks for full gradients.

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
    """One round, changing `state` only once all of it has succeeded.

    A client whose upload is faulty is rejected: it counts nowhere and its state stays as it was. Raises RunError if
    fewer than plan.min_clients uploads are left.
    """
    plan = plan or Plan()
    setup = setup.at(state.round)
    alg, info, executor = setup.algorithm, setup.info, plan.executor
    steps = local_steps(setup.problem, clients, info)
    parts = deal(steps, plan.parts)
    executor.fetch(state.clients, {client: n % executor.size for n, part in enumerate(parts) for client in part})

    def work() -> tuple[list[PartialRound], Note]:
        mine = _train_parts(setup, state, [{c: steps[c] for c in part} for part in executor.own(parts)], tracked, plan)
        return mine, [part.note() for part in mine]

    doing = _doing(f"training in round {info.index + 1}", parts, executor)
    mine, gathered = executor.together(work, doing)
    notes = in_order(gathered, len(parts))
    with section("reduce"):
        whole = join(setup, state.x, mine, notes, executor)
        require_enough(whole.reduction.clients, plan.min_clients, whole.rejected, info.index)
        x, server = aggregate(alg, state.x, state.server, whole.reduction.result(), info)
        drift = drift_of(whole, mine, notes, executor)
        executor.publish(state.clients, whole.staged, [[e for note in one for e in note["staged"]] for one in gathered])
    down = state.x.nbytes + sum(state.server[name].nbytes for name in alg.downloads())
    state.x, state.server, state.round = x, server, info.index + 1
    return RoundReport(
        clients=list(clients),
        tracked=list(tracked),
        train_loss=float(torch.tensor(whole.losses, dtype=torch.float64).mean()) if whole.losses else None,
        rejected=whole.rejected,
        bytes_up=whole.bytes_up,
        bytes_down=down * len(clients),
        client_bytes=down + whole.most_up,
        compute_seconds=whole.slowest,
        drift=drift,
        forced=whole.forced,
    )


def _train_parts(
    setup: Setup, state: FederationState, parts: list[dict[int, int]], tracked: Sequence[int], plan: Plan
) -> list[PartialRound]:
    """This process's parts, one after the other; each is client -> local steps."""
    done, total = 0, sum(sum(steps.values()) for steps in parts)

    def progress(steps: int) -> None:
        nonlocal done
        done += steps
        plan.progress(min(done, total), total)  # more where clients were trained again, see HalvingBatches

    found: list[PartialRound] = []
    stacked = plan.stacked_clients
    for steps in parts:
        found.append(train_part(setup, state, steps, set(tracked), stacked, progress))
        stacked = found[-1].forced or stacked
    return found


def _doing(what: str, parts: Sequence[Sequence[int]], executor: Executor) -> Callable[[int], str]:
    """What each process is doing, with its clients, for errors."""

    def describe_rank(rank: int) -> str:
        clients = sorted(client for part in parts[rank :: executor.size] for client in part)
        return f"{what}: clients {', '.join(map(str, clients))}"

    return describe_rank
