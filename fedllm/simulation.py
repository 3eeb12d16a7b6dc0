"""The round loop over any Problem, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm, State
from fedllm.errors import UserError
from fedllm.problem import Problem
from fedllm.rounds import Plan, round_info, run_round, sample, start


@dataclass(frozen=True)
class SimulationResult:
    """x [d]; server {name: tensor}; clients {name: [N, d]}; history [T+1, d] of x, x0 first; loss [T] of the rounds
    where the problem tells it."""

    x: Tensor
    server: State
    clients: State
    history: Tensor
    loss: list[float | None]


def simulate(
    alg: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    local_steps: int,
    clients_per_round: int | None = None,
    tracked_per_round: int | None = None,
    seed: int = 0,
    schedule: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    x0: Tensor | None = None,
    cohort: int | None = None,
) -> SimulationResult:
    """Runs `rounds` rounds of `alg` on `problem`, all in the dtype of problem.initial().

    local_steps: K, where problem.steps does not say otherwise. clients_per_round: S, default all N, or as many as the
    schedule has. tracked_per_round: T, default S. schedule: (clients, tracked) of each round, instead of drawing them
    from seed. x0: start [d], default problem.initial(). cohort: clients trained together, default all; it changes
    nothing but time.
    Raises UserError for numbers or a schedule that do not fit the federation, RunError if no client's upload is finite.
    """
    sampled = problem.num_clients if clients_per_round is None else clients_per_round
    if schedule is not None:
        _check_schedule(schedule, rounds, problem.num_clients)
        if clients_per_round is None:
            sampled = max((len(clients) for clients, _ in schedule[:rounds]), default=sampled)
    info = round_info(alg, problem, rounds=rounds, sampled=sampled, tracked=tracked_per_round, local_steps=local_steps)
    federation = start(alg, problem, info, x0=x0, cohort=cohort)
    history, losses = [federation.x.clone()], []
    for t in range(rounds):
        if schedule is None:
            clients, tracked = sample(seed, t, problem.num_clients, info.sampled, info.tracked)
        else:
            clients, tracked = ([int(client) for client in part] for part in schedule[t])
        report = run_round(alg, problem, federation, info, clients, tracked, Plan(cohort=cohort))
        losses.append(report.train_loss)
        history.append(federation.x.clone())
    everyone = federation.clients.get(range(problem.num_clients))
    return SimulationResult(federation.x, federation.server, everyone, torch.stack(history), losses)


def _check_schedule(schedule: Sequence[tuple[Sequence[int], Sequence[int]]], rounds: int, num_clients: int) -> None:
    if len(schedule) < rounds:
        raise UserError(f"schedule: found {len(schedule)} rounds, expected {rounds}")
    for t, (clients, tracked) in enumerate(schedule[:rounds]):
        sampled = {int(client) for client in clients}
        if not sampled or len(sampled) < len(clients) or not sampled <= set(range(num_clients)):
            raise UserError(
                f"schedule[{t}]: found clients {list(clients)}, expected different ones of 0..{num_clients - 1}"
            )
        if not {int(client) for client in tracked} <= sampled:
            raise UserError(
                f"schedule[{t}]: found tracked {list(tracked)}, expected some of its clients {list(clients)}"
            )
