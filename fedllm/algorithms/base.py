"""The interface of a federated algorithm: functions on matrices with one row per client.

    local  = begin(x, server, clients, info)            x [C, d] rows of the global model
    step(local, g, k, eta, info)                        in place on `local`, K times
    upload, clients' = end(local, x, server, clients, rows, info)
    x', server'      = aggregate(x, server, reduced, info)

No function mixes rows, so each client's result is independent of the other rows. Only `step` changes values in place,
and only in `local`, which the caller owns. Symbols are the papers' (docs/reference/algorithms.md): d = x_i - x after
the local steps, eta = local learning rate, eta_g = server learning rate, K = local steps, N = all clients, S = sampled,
T = tracked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.common.errors import UserError
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.blocks import BlockPartition
    from fedllm.common.tensors import State

Length = Literal["d", "B", "1"]  # a vector with one number per coordinate, one per block, or one alone (in uploads)
Vectors = Mapping[str, Length]


@dataclass(frozen=True)
class RoundInfo:
    """What an algorithm may know about a round.

    index: t, from 0. total: rounds of the run. num_clients: N. sampled: S. tracked: T. local_steps: K, the most
    steps that a client of this federation takes per round. blocks: the partition of the d coordinates for block means.
    model: a digest that identifies the model, or "" (see client.model_info). turns: how many sets of coordinates the
    rounds train in turn, see federation.turns.
    """

    index: int
    total: int
    num_clients: int
    sampled: int
    tracked: int
    local_steps: int
    blocks: BlockPartition
    model: str = ""
    turns: int = 1

    @property
    def earlier(self) -> int:
        """The number of rounds before this one that trained its coordinates: all, unless rounds take turns."""
        return self.index // self.turns


@dataclass(frozen=True)
class Rows:
    """Per-client values, one row per client: steps [C, 1] taken, rate_sum [C, 1] = sum of the learning rates really
    used, tracked [C, 1] bool."""

    steps: Tensor
    rate_sum: Tensor
    tracked: Tensor


@dataclass(frozen=True)
class Reduced:
    """The round's accepted uploads, reduced.

    mean: each upload's weighted mean over the S clients. total: each tracked upload's plain sum over the T tracked
    clients. clients, tracked: their numbers. rate_sum: "K eta" of the papers' server formulas, the weighted mean of the
    clients' sums of rates (*choice*, where they take unequal numbers of steps).
    """

    mean: State
    total: State
    rate_sum: float
    clients: int
    tracked: int


@dataclass(frozen=True)
class Contrast:
    """A term of a sample's loss that compares its representation z with those of two other models (MOON, eq. 3):

        weight * log(1 + exp((cos(z, z_far) - cos(z, z_near)) / temperature))

    z is the input of the model's last layer. near, far [C, d]: the parameters of the models of z_near and z_far, which
    get no gradient.
    """

    near: Tensor
    far: Tensor
    weight: float
    temperature: float

    def term(self, z: Tensor, z_near: Tensor, z_far: Tensor) -> Tensor:
        """The term [...] of representations [..., h]."""
        cosine = torch.nn.functional.cosine_similarity
        apart = cosine(z, z_far, dim=-1) - cosine(z, z_near, dim=-1)
        return self.weight * torch.nn.functional.softplus(apart / self.temperature)

    def rows(self, some: slice) -> Contrast:
        """That of some of the clients."""
        return replace(self, near=self.near[some], far=self.far[some])


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of every algorithm: the hyper-parameters they share, their checks, and the rate schedules."""

    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = ""
    derivable: ClassVar[tuple[str, ...]] = ()  # downloads computable from the last two x
    moment: ClassVar[str | None] = None  # the local second moment [C, d]; v_spread measures its spread
    start_loss: ClassVar[str | None] = None  # entry [C, 1] of the local state: the loss of step 1, set before it
    contrastive: ClassVar[bool] = False  # whether `contrast` gives a term of the clients' loss
    nonnegative: ClassVar[tuple[str, ...]] = ()  # uploads whose mean is set to 0 where noise made it negative

    lr: float = setting(1e-3, "local learning rate", symbol="eta")
    server_lr: float = setting(1.0, "server learning rate", symbol="eta_g")
    weight_decay: float = setting(0.0, "decoupled weight decay", symbol="lambda")
    weights: Literal["uniform", "size"] = setting("uniform", "weight of a client in the mean of the updates")
    clip_norm: float | None = setting(
        None, "clip each stochastic gradient to this global L2 norm, before anything else"
    )
    schedule: Literal["constant", "cosine_rounds", "cosine_steps", "linear"] = setting(
        "constant", "local rate over time"
    )
    warmup_rounds: int = setting(0, "rounds of linear warm-up of the local rate")

    def __post_init__(self) -> None:
        require_positive(self, "lr", "server_lr", "clip_norm")
        for name in ("weight_decay", "eps", "warmup_rounds"):
            if not getattr(self, name, 0) >= 0:
                raise UserError(f"{name}: found {getattr(self, name)}, expected zero or more")
        for index, beta in enumerate(getattr(self, "betas", ()), start=1):
            if not 0 <= beta < 1:
                raise UserError(f"betas: beta{index} is {beta}, expected a number in [0, 1)")

    # The stored and sent vectors besides x. State, checks, communication costs and tables are derived from them.

    def server_vectors(self) -> Vectors:
        """Vectors the server stores between rounds."""
        return {}

    def client_vectors(self) -> Vectors:
        """Vectors each client stores between rounds."""
        return {}

    def downloads(self) -> Vectors:
        """Vectors sent with x to each of the S clients."""
        return self.server_vectors()

    def uploads(self) -> Vectors:
        """Vectors each of the S clients sends."""
        return {"d": "d"}

    def tracked_uploads(self) -> Vectors:
        """Vectors that only the T tracked clients send."""
        return {}

    def computable(self, info: RoundInfo, equal_steps: bool) -> tuple[str, ...]:
        """Vectors that server and client can work out from the last two x instead of sending them. equal_steps: whether
        all clients take info.local_steps steps."""
        return self.derivable

    def local_moments(self) -> tuple[str, ...]:
        """The moments of the local optimizer, by name."""
        return ("m", "v") if self.moment else ()

    def held_vectors(self) -> int:
        """Vectors of d numbers that a client holds while it trains, by the count of GC Table 6.

        These are x_i, the gradient, each local moment, and each other vector that a client receives or stores, counted
        once for each name: y and y_i are one vector, their difference. As in the table, neither the running maximum
        vhat nor a running sum of the gradients counts. Block means do not count. `costs.client_memory` counts all.
        """
        named = {**self.downloads(), **self.client_vectors()}
        held = {name for name, of in named.items() if of == "d"} | {*self.local_moments()}
        return 2 + len(held - {"vhat"})

    def needs_blocks(self) -> bool:
        """Whether any of its vectors holds block means."""
        declared = (self.server_vectors(), self.client_vectors(), self.uploads(), self.tracked_uploads())
        return any("B" in vectors.values() for vectors in declared)

    def needs_full_gradient(self) -> bool:
        """Whether the clients' state starts from their full local gradients at x0."""
        return False

    def personal_fault(self) -> str:
        """Why clients cannot keep some coordinates to themselves (see problems.base.Problem.personal); "" if they can.

        On such coordinates a client sends zeros, and keeps tracked vectors as they are, so the server's vectors stay at
        their start. That must not change a client's steps there.
        """
        if self.needs_full_gradient():
            return "it begins with gradients of all coordinates; set algorithm.tracking_init=zero"
        if averaged := [name for name, of in self.uploads().items() if of == "d" and name != "d"]:
            return f"it averages {', '.join(averaged)} of each coordinate over the clients"
        given = [name for name, of in self.downloads().items() if of == "d" and name not in self.tracked_uploads()]
        return (
            f"its steps mix the gradient with {', '.join(given)}, which such coordinates do not have" if given else ""
        )

    def check(self, info: RoundInfo, steps: Sequence[int] = ()) -> None:
        """Raises UserError, naming the setting, if the algorithm cannot run in this federation. Called before the first
        round and at the start of each. steps: local steps of clients, where they are known."""

    def depends_on_total(self) -> str:
        """The setting by which a round depends on the run's number of rounds (RoundInfo.total); "" where none does.

        A run without such a setting may continue with more rounds. An algorithm that reads info.total says so here.
        """
        return f"schedule={self.schedule}" if self.schedule in ("cosine_rounds", "linear") else ""

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        """Server state at the start; gradient [d] is the mean full gradient when `needs_full_gradient`."""
        return {name: x.new_zeros(length(of, x, info)) for name, of in self.server_vectors().items()}

    def init_clients(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        """State of clients never seen before, rows x [C, d]; gradient [C, d] when `needs_full_gradient`."""
        return {name: x.new_zeros(len(x), length(of, x, info)) for name, of in self.client_vectors().items()}

    # The four phases of a round.

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        """Local state {name: [C, ...]} at the start of the round; "x" is the clients' own copy of x [C, d]."""
        return {"x": x.clone()}

    def contrast(self, local: State) -> Contrast | None:
        """The term that clients add to the loss before a step; None for no such term."""
        return None

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        """One local step in place on `local`: gradients g [C, d], k = 1, 2, ..., rates eta [C, 1]."""
        raise NotImplementedError

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        """The uploads {name: [C, ...]} and the clients' new state {name: [C, ...]}."""
        return {"d": local["x"] - x}, {}

    def keep(self, kept: State, before: State, sent: State) -> State:
        """The clients' new state where what they sent is not what `end` gave, because it was clipped or rounded.

        kept: as `end` gave it. before: the state before the round. sent: the uploads as the server reads them. A
        tracked upload is the change of the vector of its name; the server's vector remains the mean of the clients'.
        """
        return kept | {name: before[name] + sent[name] for name in self.tracked_uploads()}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        """The next global model x [d] and server state."""
        return x + self.server_lr * reduced.mean["d"], {}

    # Learning rates.

    def base_rate(self, info: RoundInfo) -> float:
        """The learning rate before warm-up and schedule."""
        return self.lr

    def rates(self, steps: Tensor, info: RoundInfo) -> Tensor:
        """Learning rates [C, K] of the round, float64, for clients that take steps [C] steps; 0 after the last step.

        Raises UserError for a round outside the run under a schedule over rounds.
        """
        if self.schedule in ("cosine_rounds", "linear") and not 0 <= info.index < info.total:
            raise UserError(
                f"round {info.index} (from 0): schedule {self.schedule} expects 0 to {info.total - 1} in a run of "
                f"{info.total} rounds; begin the run with more of them"
            )
        rate = self.base_rate(info)
        if self.warmup_rounds:
            rate *= min(1.0, (info.index + 1) / self.warmup_rounds)
        if self.schedule == "cosine_rounds":
            rate *= 0.5 * (1 + math.cos(math.pi * info.index / info.total))
        elif self.schedule == "linear":
            rate *= 1 - info.index / info.total
        k = torch.arange(int(steps.max()), dtype=torch.float64)
        count = steps[:, None].to(torch.float64)
        shape = 0.5 * (1 + torch.cos(math.pi * k / count)) if self.schedule == "cosine_steps" else torch.ones_like(k)
        return torch.where(k < count, rate * shape, 0.0)


def length(of: Length, x: Tensor, info: RoundInfo) -> int:
    """The number of values in a vector of length `of`, for x [d] or [C, d]."""
    return values(of, x.shape[-1], info.blocks.num_blocks)


def values(of: Length, dim: int, num_blocks: int) -> int:
    """The same for d coordinates and B blocks."""
    return {"d": dim, "B": num_blocks, "1": 1}[of]


def lengths(vectors: Mapping[str, Length], x: Tensor, info: RoundInfo) -> dict[str, int]:
    """Name -> number of values, for the vectors that an algorithm declares."""
    return {name: length(of, x, info) for name, of in vectors.items()}


# Checks of hyper-parameters. None means "not set", for settings that allow it.


def require_positive(alg: Algorithm, *names: str) -> None:
    """Raises UserError for the first of these settings that is not above 0."""
    for name in names:
        value = getattr(alg, name)
        if value is not None and not value > 0:
            raise UserError(f"{name}: found {value}, expected a positive number")


def require_fraction(alg: Algorithm, *names: str) -> None:
    """Raises UserError for the first of these settings that is not in [0, 1]."""
    for name in names:
        value = getattr(alg, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{name}: found {value}, expected a number in [0, 1]")


# The arithmetic that algorithms share.


def clip(g: Tensor, norm: float | None) -> Tensor:
    """Scales rows of g [C, d] down to at most this L2 norm; returns g itself if norm is None."""
    if norm is None:
        return g
    length = torch.linalg.vector_norm(g, dim=1, keepdim=True)
    return g * torch.where(length > norm, norm / length, 1.0)


def adam_direction(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """m / (sqrt(v) + eps), with 0/0 = 0: a coordinate without gradient takes no step even when eps is 0."""
    root = v.sqrt()
    if eps > 0:
        return torch.div(m, root.add_(eps), out=root)
    return torch.where((m == 0) & (root == 0), 0.0, m / root)


def descend(x: Tensor, eta: Tensor, direction: Tensor, weight_decay: float) -> None:
    """x -= eta (direction + lambda x), in place."""
    if weight_decay:
        direction = torch.add(direction, x, alpha=weight_decay)
    x.addcmul_(eta, direction, value=-1)


def update_moments(local: State, g: Tensor, betas: tuple[float, float]) -> None:
    """m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2, in place."""
    b1, b2 = betas
    local["m"].mul_(b1).add_(g, alpha=1 - b1)
    local["v"].mul_(b2).addcmul_(g, g, value=1 - b2)


def rows_of(start: Tensor | None, x: Tensor) -> Tensor:
    """A new local vector of x's shape [C, d]: a copy of `start` [d] or [C, d], or zeros. May be changed in place."""
    return torch.zeros_like(x, memory_format=torch.contiguous_format) if start is None else start.expand_as(x).clone()


def track(new: Tensor, old: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Selects `new` for tracked clients and `old` for the others; returns it and its change [C, d] from `old`."""
    kept = torch.where(rows.tracked, new, old)
    return kept, kept - old
