"""Runs rounds on any Problem, in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import MEAN, PLAIN, RobustSettings, UploadsSettings
from fedllm.algorithms.base import Algorithm
from fedllm.common.console import LongLoop
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, shown
from fedllm.federation.info import Names, round_info
from fedllm.federation.rounds import Plan, RoundReport, run_round, start
from fedllm.federation.sampling import Sampling, sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState
from fedllm.federation.turns import make_turns
from fedllm.problems import checks
from fedllm.problems.base import Problem

_LEAST = {"rounds": 0, "stacked_clients": 1, "eval_every": 1}
_NAMES = Names("clients_per_round", "tracked_per_round", "local_steps")
Evaluate = Callable[[Tensor, int], Mapping[str, Any]]
Pairs = list[tuple[list[int], list[int]]]  # (clients, tracked) of each round


@dataclass(frozen=True)
class SimulationResult:
    """x [d]; server {name: tensor}; clients {name: [N, d]}; history [T+1, d] of x, x0 first, or [0, d] if it was not
    kept; loss [T], None for rounds whose loss the problem does not give; rejected [T]: for each round, client ->
    reason; evaluations: {"round": t, ...} of each evaluation; buffers [b] of a problem that has them."""

    x: Tensor
    server: State
    clients: State
    history: Tensor
    loss: list[float | None]
    rejected: list[dict[int, str]]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    buffers: Tensor | None = None


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
    sampling: Sampling = "fixed",
    uploads: UploadsSettings = PLAIN,
    robust: RobustSettings = MEAN,
    privacy: PrivacySettings | None = None,
    turns: Sequence[Tensor] = (),
    evaluate: Evaluate | None = None,
    eval_every: int = 1,
    keep_history: bool = True,
    progress: bool = True,
) -> SimulationResult:
    """Runs `rounds` rounds of `alg` on `problem`, all in the dtype of problem.initial().

    local_steps: K; where problem.steps gives the clients their own numbers, K is the most that any has in round 0 if
    that is more, and none may have more later. clients_per_round: S, default all N, or as many as the schedule has.
    tracked_per_round: T, default S. schedule: (clients, tracked) of each round, instead of drawing them from seed.
    x0: start [d], default problem.initial(), into whose dtype it is converted. stacked_clients: clients trained
    together, default all; it changes time only. cohort: its earlier name. sampling: fixed, or poisson with S as the
    mean. uploads: clips and roundings of what clients send. robust: the rule that reduces the uploads. privacy: noise
    on the sums, of which `noise` alone is read (fedllm.aggregation.accounting has epsilon). turns: sets of coordinates
    that the rounds train in turn, each of the d in exactly one; () trains all in every round. evaluate(x, round):
    called with a copy of x after every `eval_every` rounds and after the last one; it returns numbers by name.
    keep_history: false saves the memory of T+1 copies of x. progress: shows the rounds on stderr if they take more than
    two seconds.
    A client whose upload is not finite is rejected, with a warning; `rejected` of the result lists it.
    Raises UserError for arguments that do not fit the federation, and for mistakes in `problem` or `alg`, naming the
    method; RunError if no client's upload is finite.
    """
    _check_arguments(alg, problem)
    _check_numbers({"rounds": rounds, "local_steps": local_steps, "seed": seed, "eval_every": eval_every})
    optional = {"clients_per_round": clients_per_round, "tracked_per_round": tracked_per_round}
    optional["stacked_clients"] = stacked = cohort if stacked_clients is None else stacked_clients
    _check_numbers({name: number for name, number in optional.items() if number is not None})
    pairs = None if schedule is None else _pairs(schedule, rounds, problem.num_clients)
    setup = _setup(alg, problem, rounds, local_steps, clients_per_round, tracked_per_round, pairs, turns)
    if why := robust.misfit(alg, setup.info.sampled, setup.info.tracked, sampling):
        raise UserError(why)
    if privacy is not None and privacy.level == "sample":
        raise UserError(
            "privacy.level: found sample, expected client: give as problem a fedllm.problems.private.PrivateProblem, "
            "whose gradients are clipped sample by sample, and leave privacy out"
        )
    setup = replace(setup, pipeline=Pipeline.of(uploads, alg, seed, robust, privacy))
    federation = start(setup, x0=x0, stacked_clients=stacked)
    record = _Record(keep_history, evaluate, eval_every)
    record.keep(federation.x)
    with LongLoop("round", rounds) if progress else nullcontext() as bar:
        for t in range(rounds):
            info = setup.info
            numbers = (info.num_clients, info.sampled, info.tracked)
            chosen = pairs[t] if pairs else sample(seed, t, *numbers, sampling)
            record.add(run_round(setup, federation, *chosen, Plan(stacked)), federation, last=t + 1 == rounds)
            if bar is not None:
                bar.update(t + 1)
    everyone = federation.clients.get(range(problem.num_clients))
    return record.result(federation, everyone)


def _setup(
    alg: Algorithm,
    problem: Problem,
    rounds: int,
    local_steps: int,
    sampled: int | None,
    tracked: int | None,
    pairs: Pairs | None,
    turns: Sequence[Tensor],
) -> Setup:
    """What every round works with. sampled: default the most of the schedule, or all clients."""
    if sampled is None:
        sampled = max((len(clients) for clients, _ in pairs or []), default=problem.num_clients)
    local_steps = max(local_steps, *(checks.steps(problem, range(problem.num_clients), 0) or [local_steps]))
    info = round_info(
        alg,
        problem,
        rounds=rounds,
        sampled=sampled,
        tracked=tracked,
        local_steps=local_steps,
        turns=len(turns) or 1,
        names=_NAMES,
    )
    return Setup(alg, problem, info, turns=make_turns(turns, info.blocks) if turns else ())


class _Record:
    """What a simulation keeps of its rounds. For the arguments see `simulate`."""

    def __init__(self, keep_history: bool, evaluate: Evaluate | None, eval_every: int) -> None:
        self._keep_history, self._evaluate, self._every = keep_history, evaluate, eval_every
        self._history: list[Tensor] = []
        self._losses: list[float | None] = []
        self._rejected: list[dict[int, str]] = []
        self._evaluations: list[dict[str, Any]] = []

    def keep(self, x: Tensor) -> None:
        """Adds x to the history."""
        if self._keep_history:
            self._history.append(x.clone())

    def add(self, report: RoundReport, federation: FederationState, *, last: bool) -> None:
        """Keeps a round, and evaluates where it is due."""
        t = federation.round
        self._losses.append(report.train_loss)
        self._rejected.append(report.rejected)
        for client, why in report.rejected.items():
            warnings.warn(f"round {t}: client {client} rejected: {why}", stacklevel=3)
        self.keep(federation.x)
        if self._evaluate is not None and (last or t % self._every == 0):
            found: Any = self._evaluate(federation.x.clone(), t)
            if not isinstance(found, Mapping):
                raise UserError(f"evaluate: found {shown(found)}, expected a dict such as {{'accuracy': 0.9}}")
            self._evaluations.append({"round": t, **found})

    def result(self, federation: FederationState, clients: State) -> SimulationResult:
        """The result after the last round."""
        x = federation.x
        history = torch.stack(self._history) if self._keep_history else x.new_empty(0, len(x))
        records = (history, self._losses, self._rejected, self._evaluations)
        return SimulationResult(x, federation.server, clients, *records, federation.buffers)


def _check_arguments(alg: Any, problem: Any) -> None:
    if not isinstance(alg, Algorithm):
        raise UserError(f"alg: found {alg!r}, expected an algorithm, as load_algorithm('fadamgc', lr=1e-3) gives it")
    if not isinstance(problem, Problem):
        raise UserError(f"problem: found {problem!r}, expected an instance of a subclass of fedllm.Problem")
    checks.require_counts(problem)


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise UserError(f"{name}: found {number!r}, expected a whole number")
        if name in _LEAST and number < _LEAST[name]:
            raise UserError(f"{name}: found {number}, expected {_LEAST[name]} or more")


def _pairs(schedule: Iterable[Any], rounds: int, num_clients: int) -> Pairs:
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
