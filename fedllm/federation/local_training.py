"""Trains one part of a round's clients: their local steps, then the checks and sums of their uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedllm.aggregation.upload_checks import misfit
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, clip
from fedllm.common.errors import UserError
from fedllm.common.memory import HalvingBatches
from fedllm.common.profiling import section
from fedllm.common.tensors import State
from fedllm.federation.client_states import ClientVectors
from fedllm.federation.partial_round import PartialRound, weights_of
from fedllm.federation.personal import own_rows, withhold
from fedllm.federation.setup import BUFFERS, PERSONAL, Setup
from fedllm.federation.state import FederationState
from fedllm.problems import checks
from fedllm.problems.base import Problem

Progress = Callable[[int], None]  # called with the number of clients that have taken a step


def client_too_large(client: int, smaller_steps: str = Problem.smaller_steps) -> str:
    """The error for a client that does not fit into memory alone. smaller_steps: see Problem."""
    return f"client {client}: its step alone does not fit into memory; {smaller_steps}"


def _too_large(problem: Problem) -> Callable[[int], str]:
    return partial(client_too_large, smaller_steps=problem.smaller_steps)


def train_part(
    setup: Setup,
    state: FederationState,
    steps: Mapping[int, int],
    tracked: set[int],
    stacked_clients: int | None,
    progress: Progress,
    keep: bool = False,
    trainer: Trainer | None = None,
) -> PartialRound:
    """Trains the clients of `steps` (client -> local steps, in falling order). `state` does not change.

    stacked_clients: clients trained together, None = all; fewer if memory runs out (see HalvingBatches). keep: also
    keeps each accepted client's update, see PartialRound.updates. trainer: what trains them, by default train_together.
    """
    trainer = trainer or train_together
    part = PartialRound.empty(setup, state.x)

    def train(clients: list[int]) -> Trained:
        try:
            return trainer(setup, state, clients, [steps[client] for client in clients], tracked, progress)
        except Exception as error:
            listed = ", ".join(map(str, clients))
            error.add_note(f"Round {setup.info.index + 1}, while these clients trained together: {listed}")
            raise

    batches = HalvingBatches(list(steps), stacked_clients, _too_large(setup.problem))
    for clients, trained in batches.each(train):
        accepted = _count(part, setup, state, clients, trained, tracked)
        if keep:
            rows = trained.uploads.sent["d"][[clients.index(client) for client in accepted]]
            part.updates.append((accepted, rows))
        counts = [steps[client] for client in clients]
        seconds = time.perf_counter() - trained.began
        part.slowest = max(part.slowest, seconds * max(counts) / sum(counts))
        del trained  # before the next clients' vectors are made
    part.forced = batches.forced
    return part


class Trained(NamedTuple):
    """Some clients after their local steps: their local state, their uploads, and their mean losses [C] or None.
    began: time.perf_counter() before the first step."""

    began: float
    rows: Rows
    local: State
    uploads: Uploads
    losses: Tensor | None


Trainer = Callable[[Setup, FederationState, list[int], list[int], set[int], Progress], Trained]  # see train_together


def _count(
    part: PartialRound, setup: Setup, state: FederationState, clients: list[int], trained: Trained, tracked: set[int]
) -> list[int]:
    """Sends these clients' uploads through the pipeline and adds the accepted ones, which it returns, to the part."""
    alg, declared, count = setup.algorithm, setup.declared(state.x), len(clients)
    uploads = trained.uploads
    _require_declared(alg, "what it sends", uploads.sent, declared.sent, state.x, count)
    _require_declared(alg, "what it keeps", uploads.kept, declared.kept, state.x, count)
    with section("reduce"):
        setup.pipeline.send(uploads, declared, count)
        sent = [_upload_bytes(setup, uploads.sent, declared, client in tracked) for client in clients]
        part.bytes_up, part.most_up = part.bytes_up + sum(sent), max(part.most_up, *sent)
        setup.pipeline.receive(uploads, declared, count)
        part.rejected |= {clients[row]: why for row, why in uploads.rejected.items()}
        if not (good := uploads.accepted(count)):
            return []
        accepted = [clients[row] for row in good]
        part.reduction.add(uploads, trained.rows, good, weights_of(alg, setup.problem, accepted, state.x))
        part.drift.add(state.x, trained.local, good)
        part.count_clipped(uploads.clipped, good)
        part.staged |= state.clients.stage(accepted, {name: value[good] for name, value in uploads.kept.items()})
        part.accepted += accepted
        part.losses += [] if trained.losses is None else trained.losses[good].tolist()
        return accepted


def train_together(
    setup: Setup,
    state: FederationState,
    clients: list[int],
    counts: list[int],
    tracked: set[int],
    progress: Progress,
) -> Trained:
    """The local steps of some clients that train together, in falling order of steps.

    The clients with steps left are the first rows. counts: their local steps. tracked: clients that send what tracked
    clients send. progress: called after each step with the number of clients that took it. `state` does not change.
    """
    alg, problem, info = setup.algorithm, setup.problem, setup.info
    began, x = time.perf_counter(), state.x.expand(len(clients), -1)
    rows, rates = rows_of(setup, state.x, clients, counts, tracked)
    with section("optimizer"):
        before = state.clients.get(clients, x.device)
        buffers = _first_buffers(state, before, len(clients))
        if problem.personal is not None:
            x = own_rows(x, problem.personal, before.pop(PERSONAL))
        local = alg.begin(x, state.server, before, info)
    losses: Tensor | None = None
    for k in range(counts[0]):
        active = sum(count > k for count in counts)
        view = {name: value[:active] for name, value in local.items()}
        same = dict(view)
        own = None if buffers is None else buffers[:active]
        contrast = alg.contrast(view)
        loss, g = checks.loss_and_gradient(problem, view["x"], clients[:active], info.index, k, own, contrast)
        with section("optimizer"):
            if k == 0 and alg.start_loss is not None:
                view[alg.start_loss].copy_(_known(loss, alg, problem)[:, None])
            alg.step(view, clip(g, alg.clip_norm), k + 1, rates[:active, k : k + 1], info)
        _require_in_place(alg, same, view)
        if loss is not None:
            losses = torch.zeros(len(clients), device=x.device) if losses is None else losses
            losses[:active] += loss.detach()
        progress(active)
    with section("optimizer"):
        upload, kept = alg.end(local, x, state.server, before, rows, info)
        if problem.personal is not None:
            upload, kept = withhold(alg, problem.personal, local, state.x, upload, kept, before)
    if buffers is not None and problem.buffers is not None:
        upload = {**upload, BUFFERS: buffers}
        kept = {**kept, BUFFERS: buffers} if problem.buffers.local else kept
    mean_losses = None if losses is None else losses / rows.steps[:, 0]
    uploads = Uploads(upload, kept, before, clients, info.index)
    return Trained(began, rows, local, uploads, mean_losses)


def _known(loss: Tensor | None, alg: Algorithm, problem: Problem) -> Tensor:
    """The losses [C]. Raises UserError for a problem that gives none to an algorithm that reads them."""
    if loss is None:
        raise UserError(
            f"{type(problem).__name__}.loss_and_gradient: gives no loss, but {type(alg).__name__} reads the loss of "
            "the first step; return the losses [C] beside the gradients"
        )
    return loss.detach()


def rows_of(
    setup: Setup, x: Tensor, clients: Sequence[int], counts: Sequence[int], tracked: set[int]
) -> tuple[Rows, Tensor]:
    """The values of these clients in a round, and their learning rates [C, max(counts)]. counts: their local steps."""
    steps = torch.tensor(counts)
    rates = setup.algorithm.rates(steps, setup.info).to(x)
    rows = Rows(
        steps=steps[:, None].to(x),
        rate_sum=rates.sum(dim=1, keepdim=True),
        tracked=torch.tensor([[client in tracked] for client in clients], device=x.device),
    )
    return rows, rates


def _first_buffers(state: FederationState, before: State, count: int) -> Tensor | None:
    """The buffers [C, b] that `count` clients begin the round with: their own, taken out of `before`, or the server's.

    None for a problem without buffers.
    """
    if state.buffers is None:
        return None
    return before.pop(BUFFERS) if BUFFERS in before else state.buffers.repeat(count, 1)


def full_gradients(
    setup: Setup, state: FederationState, clients: Sequence[int], stacked_clients: int | None
) -> tuple[Tensor, dict[int, ClientVectors]]:
    """The sum [d] (float64) of these clients' full gradients at x; what they start from, staged."""
    x = state.x
    total = torch.zeros_like(x, dtype=torch.float64)
    staged: dict[int, ClientVectors] = {}
    batches = HalvingBatches(clients, stacked_clients, _too_large(setup.problem))
    for chunk, gradients in batches.each(lambda chunk: checks.full_gradient(setup.problem, x, chunk)):
        total += gradients.sum(0, dtype=torch.float64)
        rows = setup.algorithm.init_clients(x.expand(len(chunk), -1), setup.info, gradients)
        staged |= state.clients.stage(chunk, rows)
    return total, staged


def local_steps(problem: Problem, clients: Sequence[int], info: RoundInfo) -> dict[int, int]:
    """Local steps of each client in round info.index: the problem's own, or the federation's K."""
    found = checks.steps(problem, clients, info.index)
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


def _upload_bytes(setup: Setup, upload: State, declared: Declared, tracked: bool) -> int:
    """Bytes that one of these clients sends: its row of each tensor, the tracked ones only if it is tracked."""
    left_out = () if tracked else declared.tracked
    given = ((name, value) for name, value in upload.items() if name not in left_out)
    return sum(setup.pipeline.bytes(name, value.shape[1], value.itemsize, declared) for name, value in given)


def _require_in_place(alg: Algorithm, before: State, after: State) -> None:
    """`step` works on views of the rows, so a new tensor under local[name] would be lost. Raises UserError for one."""
    for name in before.keys() | after.keys():
        if after.get(name) is not before.get(name):
            raise UserError(
                f"{type(alg).__name__}.step: replaced local['{name}'], expected it changed in place; write "
                f"local['{name}'] -= ... or local['{name}'].copy_(...), and make every entry in begin"
            )


def _require_declared(alg: Algorithm, what: str, found: Any, lengths: Mapping[str, int], x: Tensor, rows: int) -> None:
    """Raises UserError for wrong names, shapes or dtypes from `end`: a mistake in the algorithm, not of a client."""
    if why := misfit(found, {name: (rows, length) for name, length in lengths.items()}, x.dtype):
        declared = "client_vectors declares" if what == "what it keeps" else "uploads and tracked_uploads declare"
        raise UserError(f"{type(alg).__name__}.end: of {what}, {why}, as {declared}")
