"""Runs rounds on any Problem, in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.problems import checks
from fedllm.problems.base import Problem

_LEAST = {"rounds": 0, "stacked_clients": 1}


@dataclass(frozen=True)
class SimulationResult:
    """x [d]; server {name: tensor}; clients {name: [N, d]}; history [T+1, d] of x, x0 first; loss [T], None
    for rounds whose loss the problem does not give; rejected [T]: for each round, client -> reason."""

    x: Tensor
    server: State
    clients: State
    history: Tensor
    loss: list[float | None]
    rejected: list[dict[int, str]]


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
    stacked_clients: int | None = None,
    cohort: int | None = None,
) -> SimulationResult:
    """Runs `rounds` rounds of `alg` on `problem`, all in the dtype of problem.initial().

    local_steps: K; where problem.steps gives the clients their own numbers, K is the most that any has in round 0 if
    that is more, and none may have more later. clients_per_round: S, default all N, or as many as the schedule has.
    tracked_per_round: T, default S. schedule: (clients, tracked) of each round, instead of drawing them from seed.
    x0: start [d], default problem.initial(), into whose dtype it is converted. stacked_clients: clients trained
    together, default all; it changes time only. cohort: its earlier name.
    A client whose upload is not finite is rejected, with a warning; `rejected` of the result lists it.
    Raises UserError for arguments that do not fit the federation, and for mistakes in `problem` or `alg`, naming the
    method; RunError if no client's upload is finite.
    """
    _check_arguments(alg, problem)
    _check_numbers({"rounds": rounds, "local_steps": local_steps, "seed": seed})
    optional = {"clients_per_round": clients_per_round, "tracked_per_round": tracked_per_round}
    optional["stacked_clients"] = stacked = cohort if stacked_clients is None else stacked_clients
    _check_numbers({name: number for name, number in optional.items() if number is not None})
    sampled = problem.num_clients if clients_per_round is None else clients_per_round
    pairs = None if schedule is None else _pairs(schedule, rounds, problem.num_clients)
    if pairs is not None and clients_per_round is None:
        sampled = max((len(clients) for clients, _ in pairs), default=sampled)
    local_steps = max(local_steps, *(checks.steps(problem, range(problem.num_clients), 0) or [local_steps]))
    info = round_info(alg, problem, rounds=rounds, sampled=sampled, tracked=tracked_per_round, local_steps=local_steps)
    setup, plan = Setup(alg, problem, info), Plan(stacked)
    federation = start(setup, x0=x0, stacked_clients=stacked)
    history, losses = [federation.x.clone()], []
    rejected: list[dict[int, str]] = []
    for t in range(rounds):
        chosen = pairs[t] if pairs else sample(seed, t, problem.num_clients, info.sampled, info.tracked)
        report = run_round(setup, federation, *chosen, plan)
        losses.append(report.train_loss)
        rejected.append(report.rejected)
        for client, why in report.rejected.items():
            warnings.warn(f"round {t + 1}: client {client} rejected: {why}", stacklevel=2)
        history.append(federation.x.clone())
    everyone = federation.clients.get(range(problem.num_clients))
    return SimulationResult(federation.x, federation.server, everyone, torch.stack(history), losses, rejected)


def _check_arguments(alg: Any, problem: Any) -> None:
    if not isinstance(alg, Algorithm):
        raise UserError(f"alg: found {alg!r}, expected an algorithm, as load_algorithm('fadamgc', lr=1e-3) gives it")
    if not isinstance(problem, Problem):
        raise UserError(f"problem: found {problem!r}, expected an instance of a subclass of fedllm.Problem")


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise UserError(f"{name}: found {number!r}, expected a whole number")
        if name in _LEAST and number < _LEAST[name]:
            raise UserError(f"{name}: found {number}, expected {_LEAST[name]} or more")


def _pairs(schedule: Iterable[Any], rounds: int, num_clients: int) -> list[tuple[list[int], list[int]]]:
    """(clients, tracked) of each round, checked."""
    found = [_pair(t, entry) for t, entry in enumerate(islice(schedule, rounds))]
    if len(found) < rounds:
        raise UserError(f"schedule: found {len(found)} rounds, expected {rounds}")
    for t, (clients, tracked) in enumerate(found):
        sampled = set(clients)
        if not sampled or len(sampled) < len(clients) or not sampled <= set(range(num_clients)):
            raise UserError(f"schedule[{t}]: found clients {clients}, expected different ones of 0..{num_clients - 1}")
        if not set(tracked) <= sampled:
            raise UserError(f"schedule[{t}]: found tracked {tracked}, expected some of its clients {clients}")
    return found


def _pair(t: int, entry: Any) -> tuple[list[int], list[int]]:
    try:
        clients, tracked = entry
        return [index(client) for client in clients], [index(client) for client in tracked]
    except (TypeError, ValueError):
        raise UserError(
            f"schedule[{t}]: found {entry!r}, expected two lists of whole numbers, (clients, tracked)"
        ) from None
