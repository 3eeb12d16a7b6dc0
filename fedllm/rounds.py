"""The round loop: sample, train cohorts, check and reduce their uploads, aggregate, commit.

It knows neither the insides of a model nor the equations of an algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, State, clip
from fedllm.blocks import BlockPartition
from fedllm.clients import ClientStore
from fedllm.drift import Drift
from fedllm.errors import RunError, UserError
from fedllm.problem import Problem
from fedllm.random import numpy_rng
from fedllm.reduction import Reduction
from fedllm.uploads import faults


@dataclass
class Federation:
    """The whole state of a run after `round` rounds: global x [d], the server's vectors, and the clients'."""

    round: int
    x: Tensor
    server: State
    clients: ClientStore


@dataclass(frozen=True)
class Plan:
    """How a round's work is done. cohort: clients trained together, None = all. min_clients: accepted uploads without
    which the run stops. progress(done, total): called after each local step, counted in client-steps."""

    cohort: int | None = None
    min_clients: int = 1
    progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round. train_loss: mean over the accepted clients of their steps' mean loss, or None.
    rejected: client -> why. bytes_up, bytes_down: of the tensors sent, rejected ones included. client_bytes: both ways,
    by the client that sent the most. compute_seconds: the slowest client's share, by its steps, of its cohort's time.
    drift: how far the accepted clients part, see Drift.measures.
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


def sample(seed: int, round: int, num_clients: int, sampled: int, tracked: int) -> tuple[list[int], list[int]]:
    """S clients uniformly without replacement, and a uniform subset of T of them; both sorted."""
    chosen = numpy_rng(seed, "sample", round).choice(num_clients, sampled, replace=False)
    subset = numpy_rng(seed, "track", round).choice(chosen, tracked, replace=False)
    return sorted(chosen.tolist()), sorted(subset.tolist())


def round_info(
    alg: Algorithm, problem: Problem, *, rounds: int, sampled: int, tracked: int | None, local_steps: int
) -> RoundInfo:
    """The facts of the run, as of round 0. Raises UserError where S or T do not fit the federation."""
    if not 1 <= sampled <= problem.num_clients:
        raise UserError(
            f"federation.clients_per_round: found {sampled}, expected 1 to {problem.num_clients}, the number of clients"
        )
    tracked = sampled if tracked is None else tracked
    if not 0 <= tracked <= sampled:
        raise UserError(
            f"federation.tracked_per_round: found {tracked}, expected 0 to {sampled}, which is clients_per_round"
        )
    if local_steps < 1:
        raise UserError(f"local.steps: found {local_steps}, expected 1 or more")
    blocks = problem.blocks
    if blocks is None or getattr(alg, "blocks", None) == "elementwise":
        blocks = BlockPartition.elementwise(problem.dim)
    return RoundInfo(0, rounds, problem.num_clients, sampled, tracked, local_steps, blocks)


def blank(alg: Algorithm, problem: Problem, info: RoundInfo, x0: Tensor | None = None) -> Federation:
    """The state before the first round, every vector at its plain initial value."""
    x = (problem.initial() if x0 is None else x0).clone()
    x_cpu = x.cpu()
    store = ClientStore(lambda count: alg.init_clients(x_cpu.expand(count, -1), info))
    return Federation(0, x, alg.init_server(x, info), store)


def start(
    alg: Algorithm, problem: Problem, info: RoundInfo, *, x0: Tensor | None = None, cohort: int | None = None
) -> Federation:
    """The state before the first round, after the pass over the data where the algorithm asks for full gradients."""
    federation = blank(alg, problem, info, x0)
    if not alg.needs_full_gradient():
        return federation
    x = federation.x
    total = torch.zeros_like(x, dtype=torch.float64)
    for chunk in _chunks(range(problem.num_clients), cohort):
        gradients = problem.full_gradient(x, chunk)
        total += gradients.sum(0, dtype=torch.float64)
        federation.clients.put(chunk, alg.init_clients(x.expand(len(chunk), -1), info, gradients))
    federation.server = alg.init_server(x, info, (total / problem.num_clients).to(x.dtype))
    return federation


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
    order = sorted(clients, key=lambda client: (-steps[client], client))
    reduction, drift = Reduction(alg, federation.x, info), Drift(alg, federation.x)
    rejected: dict[int, str] = {}
    kept: list[tuple[list[int], State]] = []
    losses: list[Tensor] = []
    down = federation.x.nbytes + sum(federation.server[name].nbytes for name in alg.downloads())
    slowest, done, bytes_up, most = 0.0, 0, 0, 0
    for cohort in _chunks(order, plan.cohort):
        began, counts = time.perf_counter(), [steps[client] for client in cohort]
        report = _progress(plan, done, sum(steps.values()))
        rows, local, upload, state, loss = _train(alg, problem, federation, info, cohort, counts, set(tracked), report)
        sent = [_upload_bytes(alg, upload, client in tracked) for client in cohort]
        bytes_up, most = bytes_up + sum(sent), max(most, *sent)
        bad = faults(state, reduction.kept_lengths, federation.x.dtype, len(cohort))
        bad |= faults(upload, reduction.lengths, federation.x.dtype, len(cohort))
        rejected |= {cohort[row]: why for row, why in bad.items()}
        good = [row for row in range(len(cohort)) if row not in bad]
        accepted = [cohort[row] for row in good]
        if good:
            reduction.add(upload, rows, good, _weights(alg, problem, accepted, federation.x))
            drift.add(federation.x, local, good)
            kept.append((accepted, {name: value[good] for name, value in state.items()}))
            losses += [] if loss is None else [loss[good]]
        del local  # before the next cohort makes its own
        done += sum(counts)
        slowest = max(slowest, (time.perf_counter() - began) * max(counts) / sum(counts))
    _require_enough(reduction.clients, plan.min_clients, rejected, info.index)
    x, server = alg.aggregate(federation.x, federation.server, reduction.result(), info)
    if not all(bool(torch.isfinite(value).all()) for value in (x, *server.values())):
        raise RunError(f"round {info.index + 1}: the aggregated model is not finite; lower algorithm.lr or server_lr")
    for accepted, state in kept:
        federation.clients.put(accepted, state)
    federation.x, federation.server, federation.round = x, server, info.index + 1
    train_loss = float(torch.cat(losses).double().mean()) if losses else None
    return RoundReport(
        clients=list(clients),
        tracked=list(tracked),
        train_loss=train_loss,
        rejected=rejected,
        bytes_up=bytes_up,
        bytes_down=down * len(clients),
        client_bytes=down + most,
        compute_seconds=slowest,
        drift=drift.measures(),
    )


def local_steps(problem: Problem, clients: Sequence[int], info: RoundInfo) -> dict[int, int]:
    """Local steps of each client in round info.index: the problem's own, or the federation's K."""
    found = problem.steps(clients, info.index)
    if found is None:
        return dict.fromkeys(clients, info.local_steps)
    steps = dict(zip(clients, (int(count) for count in found), strict=True))
    for client, count in steps.items():
        if count < 1:
            raise UserError(f"client {client}: has {count} local steps in round {info.index + 1}, expected at least 1")
    return steps


class Trained(NamedTuple):
    """A cohort after its local steps: local and what end made of it, and its clients' mean losses [C], where known."""

    rows: Rows
    local: State
    upload: State
    state: State
    losses: Tensor | None


def _train(
    alg: Algorithm,
    problem: Problem,
    federation: Federation,
    info: RoundInfo,
    clients: list[int],
    counts: list[int],
    tracked: set[int],
    progress: Callable[[int], None],
) -> Trained:
    """The local steps of a cohort, its clients in order of falling step counts, so that those still at work are always
    the first rows."""
    x = federation.x.expand(len(clients), -1)
    steps = torch.tensor(counts)
    kept = federation.clients.get(clients, x.device)
    rates = alg.rates(steps, info).to(x)
    rows = Rows(
        steps=steps[:, None].to(x),
        rate_sum=rates.sum(dim=1, keepdim=True),
        tracked=torch.tensor([[client in tracked] for client in clients], device=x.device),
    )
    local = alg.begin(x, federation.server, kept, info)
    losses: Tensor | None = None
    for k in range(counts[0]):
        active = sum(count > k for count in counts)
        view = {name: value[:active] for name, value in local.items()}
        before = dict(view)
        loss, g = problem.loss_and_gradient(view["x"], clients[:active], info.index, k)
        alg.step(view, clip(g, alg.clip_norm), k + 1, rates[:active, k : k + 1], info)
        _require_in_place(alg, before, view)
        if loss is not None:
            losses = torch.zeros(len(clients), device=x.device) if losses is None else losses
            losses[:active] += loss.detach()
        progress(active)
    upload, state = alg.end(local, x, federation.server, kept, rows, info)
    return Trained(rows, local, upload, state, None if losses is None else losses / rows.steps[:, 0])


def _upload_bytes(alg: Algorithm, upload: State, tracked: bool) -> int:
    """Bytes that one client of a cohort sends: its row of each tensor, the tracked ones only if it is tracked."""
    left_out = () if tracked else alg.tracked_uploads()
    return sum(value.nbytes // len(value) for name, value in upload.items() if name not in left_out)


def _require_in_place(alg: Algorithm, before: State, after: State) -> None:
    """A step that rebinds local[name] would be lost without a word, since it is given views of the rows at work."""
    for name in before.keys() | after.keys():
        if after.get(name) is not before.get(name):
            raise UserError(
                f"{type(alg).__name__}.step: replaced local['{name}'], expected it changed in place; write "
                f"local['{name}'] -= ... or local['{name}'].copy_(...), and make every entry in begin"
            )


def _weights(alg: Algorithm, problem: Problem, clients: list[int], x: Tensor) -> Tensor:
    if alg.weights == "uniform":
        return torch.ones(len(clients), dtype=torch.float64, device=x.device)
    return problem.sizes(clients).to(device=x.device, dtype=torch.float64)


def _require_enough(accepted: int, least: int, rejected: dict[int, str], index: int) -> None:
    if accepted >= max(1, least):
        return
    reasons = "\n".join(f"  client {client}: {why}" for client, why in sorted(rejected.items()))
    raise RunError(
        f"round {index + 1}: {accepted} accepted uploads, federation.min_clients asks for {max(1, least)}. "
        f"The last checkpoint is intact. Rejected:\n{reasons}"
    )


def _chunks(items: Sequence[int], size: int | None) -> Iterator[list[int]]:
    size = size or max(1, len(items))
    for begin in range(0, len(items), size):
        yield list(items[begin : begin + size])


def _progress(plan: Plan, done: int, total: int) -> Callable[[int], None]:
    def report(steps: int) -> None:
        nonlocal done
        done += steps
        plan.progress(done, total)

    return report
