"""How one process trains its share of a round's clients: cohort by cohort, every upload checked before it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedllm import checked
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, State, clip
from fedllm.clients import Kept, pack_kept, unpack_kept
from fedllm.drift import Drift
from fedllm.errors import UserError
from fedllm.memory import Waves
from fedllm.problem import Problem
from fedllm.profile import section
from fedllm.reduction import Reduction
from fedllm.uploads import faults, misfit

if TYPE_CHECKING:
    from fedllm.rounds import Federation


@dataclass
class Share:
    """What the training of some of a round's clients gave.

    kept: what the accepted clients keep, staged. losses: of the accepted clients, each the mean
    over its steps. rejected: client -> why. bytes_up: of all uploads; most_up: of the largest. slowest: seconds of the
    slowest client, see RoundReport. forced: the cohort size that memory forced on it, see Waves.
    """

    reduction: Reduction
    drift: Drift
    kept: dict[int, Kept] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    most_up: int = 0
    slowest: float = 0.0
    forced: int | None = None

    @classmethod
    def empty(cls, alg: Algorithm, x: Tensor, info: RoundInfo) -> Share:
        """Before any client has been trained."""
        return cls(Reduction(alg, x, info), Drift(alg, x))

    def join(self, other: Share) -> None:
        """Adds what other clients gave."""
        for mine, theirs in ((self.reduction.sums, other.reduction.sums), (self.drift.sums, other.drift.sums)):
            for name, total in mine.items():
                total += theirs[name].to(total.device)
        for name, count in other.reduction.counts.items():
            self.reduction.counts[name] += count
        self.kept |= other.kept
        self.losses += other.losses
        self.rejected |= other.rejected
        self.bytes_up += other.bytes_up
        self.most_up, self.slowest = max(self.most_up, other.most_up), max(self.slowest, other.slowest)
        self.forced = min((size for size in (self.forced, other.forced) if size), default=None)

    def pack(self) -> tuple[dict[str, Any], State]:
        """The share as JSON data and tensors, for another process."""
        files, tensors = pack_kept(self.kept)
        head = {
            "counts": self.reduction.counts,
            "files": files,
            "losses": self.losses,
            "rejected": list(self.rejected.items()),
            "numbers": [self.bytes_up, self.most_up, self.slowest, self.forced],
        }
        tensors |= {f"upload/{name}": value for name, value in self.reduction.sums.items()}
        tensors |= {f"drift/{name}": value for name, value in self.drift.sums.items()}
        return head, tensors

    def unpack(self, head: dict[str, Any], tensors: State) -> Share:
        """An empty share filled with what another one packed."""
        self.reduction.sums, self.drift.sums = under("upload/", tensors), under("drift/", tensors)
        self.reduction.counts = head["counts"]
        self.kept = unpack_kept(head["files"], tensors)
        self.losses, self.rejected = head["losses"], dict(head["rejected"])
        self.bytes_up, self.most_up, self.slowest, self.forced = head["numbers"]
        return self


def under(prefix: str, tensors: State) -> State:
    """The tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def deal(work: Mapping[int, float], shares: int) -> list[list[int]]:
    """The clients in at most `shares` shares of nearly the same work, each in order of falling work, none empty.

    The client with the most work left goes to the share with the least: a function of `work` and `shares` alone.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [0.0] * shares
    for client in sorted(work, key=lambda client: (-work[client], client)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(client)
        loads[lightest] += work[client]
    return [clients for clients in dealt if clients]


def train_share(
    alg: Algorithm,
    problem: Problem,
    federation: Federation,
    info: RoundInfo,
    steps: Mapping[int, int],
    tracked: set[int],
    cohort_size: int | None,
    progress: Callable[[int], None],
) -> Share:
    """Trains the clients of `steps` (client -> local steps, falling), changing nothing in `federation`.

    progress(n): called when n clients have taken a step.
    """
    share = Share.empty(alg, federation.x, info)
    reduction = share.reduction

    def train(cohort: list[int]) -> Trained:
        counts = [steps[client] for client in cohort]
        try:
            return _train(alg, problem, federation, info, cohort, counts, tracked, progress)
        except Exception as error:
            error.add_note(f"Round {info.index + 1}, while these clients trained together: {_listed(cohort)}")
            raise

    waves = Waves(list(steps), cohort_size)
    for cohort, (began, rows, local, upload, state, loss) in waves.each(train):
        counts = [steps[client] for client in cohort]
        _require_declared(alg, "what it sends", upload, reduction.lengths, federation.x, len(cohort))
        _require_declared(alg, "what it keeps", state, reduction.kept_lengths, federation.x, len(cohort))
        sent = [_upload_bytes(alg, upload, client in tracked) for client in cohort]
        share.bytes_up, share.most_up = share.bytes_up + sum(sent), max(share.most_up, *sent)
        with section("reduce"):
            bad = faults(state, reduction.kept_lengths, federation.x.dtype, len(cohort))
            bad |= faults(upload, reduction.lengths, federation.x.dtype, len(cohort))
            share.rejected |= {cohort[row]: why for row, why in bad.items()}
            good = [row for row in range(len(cohort)) if row not in bad]
            accepted = [cohort[row] for row in good]
            if good:
                reduction.add(upload, rows, good, _weights(alg, problem, accepted, federation.x))
                share.drift.add(federation.x, local, good)
                share.kept |= federation.clients.stage(accepted, {name: value[good] for name, value in state.items()})
                share.losses += [] if loss is None else loss[good].tolist()
        del local  # before the next cohort makes its own
        share.slowest = max(share.slowest, (time.perf_counter() - began) * max(counts) / sum(counts))
    share.forced = waves.forced
    return share


class Trained(NamedTuple):
    """A cohort after its local steps: local and what end made of it, and its clients' mean losses [C], where known.
    began: time.perf_counter() before the first step."""

    began: float
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
    began, x = time.perf_counter(), federation.x.expand(len(clients), -1)
    steps = torch.tensor(counts)
    rates = alg.rates(steps, info).to(x)
    rows = Rows(
        steps=steps[:, None].to(x),
        rate_sum=rates.sum(dim=1, keepdim=True),
        tracked=torch.tensor([[client in tracked] for client in clients], device=x.device),
    )
    with section("optimizer"):
        kept = federation.clients.get(clients, x.device)
        local = alg.begin(x, federation.server, kept, info)
    losses: Tensor | None = None
    for k in range(counts[0]):
        active = sum(count > k for count in counts)
        view = {name: value[:active] for name, value in local.items()}
        before = dict(view)
        loss, g = checked.loss_and_gradient(problem, view["x"], clients[:active], info.index, k)
        with section("optimizer"):
            alg.step(view, clip(g, alg.clip_norm), k + 1, rates[:active, k : k + 1], info)
        _require_in_place(alg, before, view)
        if loss is not None:
            losses = torch.zeros(len(clients), device=x.device) if losses is None else losses
            losses[:active] += loss.detach()
        progress(active)
    with section("optimizer"):
        upload, state = alg.end(local, x, federation.server, kept, rows, info)
    return Trained(began, rows, local, upload, state, None if losses is None else losses / rows.steps[:, 0])


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


def _require_declared(alg: Algorithm, what: str, found: Any, lengths: Mapping[str, int], x: Tensor, rows: int) -> None:
    """What `end` gives of the wrong names, shapes or dtype is the algorithm's mistake and no client's."""
    if why := misfit(found, {name: (rows, length) for name, length in lengths.items()}, x.dtype):
        declared = "client_vectors declares" if what == "what it keeps" else "uploads and tracked_uploads declare"
        raise UserError(f"{type(alg).__name__}.end: of {what}, {why}, as {declared}")


def _weights(alg: Algorithm, problem: Problem, clients: list[int], x: Tensor) -> Tensor:
    if alg.weights == "uniform":
        return torch.ones(len(clients), dtype=torch.float64, device=x.device)
    return checked.sizes(problem, clients).to(device=x.device, dtype=torch.float64)


def _listed(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients))
