"""The round loop: sample, train cohorts, check and reduce their uploads, aggregate, commit.

It knows neither the insides of a model nor the equations of an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedllm import checked
from fedllm.algorithms.base import Algorithm, RoundInfo, State, check_declared
from fedllm.blocks import BlockPartition
from fedllm.clients import ClientFiles, ClientStore, Kept
from fedllm.crew import Crew
from fedllm.errors import UserError
from fedllm.memory import Waves
from fedllm.problem import Problem
from fedllm.profile import section
from fedllm.random import numpy_rng
from fedllm.reduction import aggregate, require_enough
from fedllm.training import Share, deal, train_share


@dataclass
class Federation:
    """The whole state of a run after `round` rounds: global x [d], the server's vectors, and the clients'."""

    round: int
    x: Tensor
    server: State
    clients: ClientStore


@dataclass(frozen=True)
class Plan:
    """How a round's work is done. cohort: clients trained together, None = all; fewer where memory gives out (see
    memory.Waves). min_clients: accepted uploads without which the run stops. progress(done, total): called after each
    local step, counted in this process's client-steps. shares: the clients are dealt by work into this many shares,
    summed one after the other. crew: the processes that train them; how many they are changes nothing."""

    cohort: int | None = None
    min_clients: int = 1
    progress: Callable[[int, int], None] = lambda done, total: None
    shares: int = 1
    crew: Crew = field(default_factory=Crew)


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round. train_loss: mean over the accepted clients of their steps' mean loss, or None.
    rejected: client -> why. bytes_up, bytes_down: of the tensors sent, rejected ones included. client_bytes: both ways,
    by the client that sent the most. compute_seconds: the slowest client's share, by its steps, of its cohort's time.
    drift: how far the accepted clients part, see Drift.measures. forced: the cohort size that memory forced, if it did.
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


def sample(seed: int, round: int, num_clients: int, sampled: int, tracked: int) -> tuple[list[int], list[int]]:
    """S clients uniformly without replacement, and a uniform subset of T of them; both sorted."""
    chosen = numpy_rng(seed, "sample", round).choice(num_clients, sampled, replace=False)
    subset = numpy_rng(seed, "track", round).choice(chosen, tracked, replace=False)
    return sorted(chosen.tolist()), sorted(subset.tolist())


def round_info(
    alg: Algorithm, problem: Problem, *, rounds: int, sampled: int, tracked: int | None, local_steps: int
) -> RoundInfo:
    """The facts of the run, as of round 0. Raises UserError where S or T do not fit the federation, or `alg` declares a
    vector of another length than "d" or "B"."""
    check_declared(alg)
    blocks = problem.blocks
    if blocks is not None and blocks.dim != problem.dim:
        raise UserError(
            f"{type(problem).__name__}.blocks: found {blocks.dim:,} coordinates, expected {problem.dim:,}, its dim"
        )
    if blocks is None or getattr(alg, "blocks", None) == "elementwise":
        blocks = BlockPartition.elementwise(problem.dim)
    return run_info(
        blocks,
        rounds=rounds,
        num_clients=problem.num_clients,
        sampled=sampled,
        tracked=tracked,
        local_steps=local_steps,
    )


def run_info(
    blocks: BlockPartition, *, rounds: int, num_clients: int, sampled: int, tracked: int | None, local_steps: int
) -> RoundInfo:
    """The same without a problem. Raises UserError where S or T do not fit the federation."""
    if not 1 <= sampled <= num_clients:
        raise UserError(
            f"federation.clients_per_round: found {sampled}, expected 1 to {num_clients}, the number of clients"
        )
    tracked = sampled if tracked is None else tracked
    if not 0 <= tracked <= sampled:
        raise UserError(
            f"federation.tracked_per_round: found {tracked}, expected 0 to {sampled}, which is clients_per_round"
        )
    if local_steps < 1:
        raise UserError(f"local.steps: found {local_steps}, expected 1 or more")
    return RoundInfo(0, rounds, num_clients, sampled, tracked, local_steps, blocks)


def blank(
    alg: Algorithm, problem: Problem, info: RoundInfo, x0: Tensor | None = None, folder: Path | None = None
) -> Federation:
    """The state before the first round, every vector at its plain initial value. folder: of files in which the clients'
    vectors are kept, default in memory."""
    x = checked.start(problem, x0)
    x_cpu = x.cpu()

    def initial(count: int) -> State:
        return alg.init_clients(x_cpu.expand(count, -1), info)

    store = ClientStore(initial) if folder is None else ClientFiles(initial, folder)
    return Federation(0, x, alg.init_server(x, info), store)


def start(
    alg: Algorithm,
    problem: Problem,
    info: RoundInfo,
    *,
    x0: Tensor | None = None,
    cohort: int | None = None,
    shares: int = 1,
    crew: Crew | None = None,
    folder: Path | None = None,
) -> Federation:
    """The state before the first round, after the pass over the data where the algorithm asks for full gradients.
    folder: see `blank`."""
    federation = blank(alg, problem, info, x0, folder)
    if not alg.needs_full_gradient():
        return federation
    everyone = range(problem.num_clients)
    dealt = deal(dict(zip(everyone, checked.sizes(problem, everyone).tolist(), strict=True)), shares)
    total = torch.zeros_like(federation.x, dtype=torch.float64)
    parts = (crew or Crew()).gradients(
        federation.x, dealt, cohort, lambda clients: full_gradients(alg, problem, federation, info, clients, cohort)
    )
    for part, kept in parts:
        total += part.to(total.device)
        federation.clients.commit(kept)
    federation.server = alg.init_server(federation.x, info, (total / problem.num_clients).to(federation.x.dtype))
    return federation


def full_gradients(
    alg: Algorithm,
    problem: Problem,
    federation: Federation,
    info: RoundInfo,
    clients: Sequence[int],
    cohort: int | None,
) -> tuple[Tensor, dict[int, Kept]]:
    """The sum [d] (float64) of these clients' full gradients at x; what they start from, staged."""
    x = federation.x
    total = torch.zeros_like(x, dtype=torch.float64)
    staged: dict[int, Kept] = {}
    waves = Waves(clients, cohort)
    for chunk, gradients in waves.each(lambda chunk: checked.full_gradient(problem, x, chunk)):
        total += gradients.sum(0, dtype=torch.float64)
        staged |= federation.clients.stage(chunk, alg.init_clients(x.expand(len(chunk), -1), info, gradients))
    return total, staged


def run_round(
    alg: Algorithm,
    problem: Problem,
    federation: Federation,
    info: RoundInfo,
    clients: Sequence[int],
    tracked: Sequence[int],
    plan: Plan | None = None,
) -> RoundReport:
    """One round, changing `federation` only once all of it has succeeded.

    A client whose upload is faulty is rejected: it counts nowhere and its state stays as it was. Raises RunError if
    fewer than plan.min_clients uploads are left.
    """
    plan = plan or Plan()
    info = replace(info, index=federation.round)
    steps = local_steps(problem, clients, info)
    shares = deal(steps, plan.shares)
    progress = _progress(plan, [{client: steps[client] for client in share} for share in shares])

    cohort = plan.cohort

    def train(share: list[int]) -> Share:
        nonlocal cohort
        mine = {client: steps[client] for client in share}
        trained = train_share(alg, problem, federation, info, mine, set(tracked), cohort, progress)
        cohort = trained.forced or cohort
        return trained

    parts = plan.crew.train(alg, federation, info, shares, tracked, plan.cohort, train)
    down = federation.x.nbytes + sum(federation.server[name].nbytes for name in alg.downloads())
    with section("reduce"):
        found = Share.empty(alg, federation.x, info)
        for part in parts:
            found.join(part)
        require_enough(found.reduction.clients, plan.min_clients, found.rejected, info.index)
        x, server = aggregate(alg, federation.x, federation.server, found.reduction.result(), info)
        federation.clients.commit(found.kept)
        drift = found.drift.measures()
    federation.x, federation.server, federation.round = x, server, info.index + 1
    train_loss = float(torch.tensor(found.losses, dtype=torch.float64).mean()) if found.losses else None
    return RoundReport(
        clients=list(clients),
        tracked=list(tracked),
        train_loss=train_loss,
        rejected=found.rejected,
        bytes_up=found.bytes_up,
        bytes_down=down * len(clients),
        client_bytes=down + found.most_up,
        compute_seconds=found.slowest,
        drift=drift,
        forced=found.forced,
    )


def local_steps(problem: Problem, clients: Sequence[int], info: RoundInfo) -> dict[int, int]:
    """Local steps of each client in round info.index: the problem's own, or the federation's K."""
    found = checked.steps(problem, clients, info.index)
    if found is None:
        return dict.fromkeys(clients, info.local_steps)
    steps = dict(zip(clients, found, strict=True))
    for client, count in steps.items():
        if count < 1:
            raise UserError(f"client {client}: has {count} local steps in round {info.index + 1}, expected at least 1")
        if count > info.local_steps:
            raise UserError(
                f"client {client}: has {count} local steps in round {info.index + 1}, expected at most "
                f"{info.local_steps}, the most of this federation; raise local_steps"
            )
    return steps


def _progress(plan: Plan, shares: Sequence[dict[int, int]]) -> Callable[[int], None]:
    """Counts the client-steps of this process; at each of them, the crew may tell that another one has failed."""
    done, total = 0, sum(sum(steps.values()) for steps in plan.crew.own(shares))

    def report(steps: int) -> None:
        nonlocal done
        done += steps
        plan.crew.check()
        plan.progress(min(done, total), total)  # more where a cohort was done again, see Waves

    return report
