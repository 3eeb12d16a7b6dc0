"""FAdamGC (FAdamGT, FedIT-AdamGT): the gradient is corrected before Adam's moments, not the weights after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import (
    Algorithm,
    Reduced,
    RoundInfo,
    Rows,
    Vectors,
    adam_direction,
    descend,
    rows_of,
    track,
    update_moments,
)
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FAdamGC(Algorithm):
    """Server keeps y; client keeps y_i, v_i, vhat_i; m = 0 at the start of a round. For k = 1..K:
        gh = g + y - y_i
        m = b1 m + (1-b1) gh
        v = b2 v + (1-b2) gh^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i)
    Tracked clients, who send y_i' - y_i:
        y_i' = (1/K) sum_k g, of the raw gradients
    Server:
        x += eta_g D
        y += (1/N) sum_{i in T} (y_i' - y_i)
    At the start v_i = vhat_i = 0 and y_i = y = 0; with `tracking_init: gradient`
        y_i = full local gradient at x0,  y = mean_i y_i

    y is the mean of all N clients' y_i after every round. No bias correction: GC's analysis forgoes it.

    *choice*: eps is added to the root, as in GC Alg. 1 and torch.optim.Adam. GC eq. 2, 4 and Alg. 2 print it inside the
    root, where 1e-8 keeps the root above 1e-4. *choice*: tracked and untracked clients keep v_i and vhat_i, as PT
    prints. GC Alg. 1 has that line under `else`, so that tracked clients would lose theirs. *choice*: y_i starts at 0,
    since PT has no line on it, and a first round without correction is LocalAdam's; `tracking_init: gradient` is GC
    Alg. 1, line 1, and costs a pass over all data. *choice*: y_i' is the mean over the steps that the client takes,
    which may be fewer than K.

    `local` (GC App. J): rmsprop has no first moment and no maximum, v_i persists, and x_i -= eta (gh/(sqrt(v)+eps) +
    lambda x_i). adamw "operates identically to FAdamGC, the only difference being decoupled weight decay", and decay is
    decoupled above already: it is adam by another name, and what makes it AdamW is a `weight_decay` above 0.
    """

    aliases: ClassVar = ("fadamgt", "fedit_adamgt", "fedit_adamgc")
    paper: ClassVar = (
        "Gradient Correction in Federated Learning with Adaptive Optimization, Alg. 1 and App. J; "
        "Parameter Tracking in Federated Learning with Adaptive Optimization, FAdamGT"
    )
    moment: ClassVar = "v"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    tracking_init: Literal["zero", "gradient"] = setting("zero", "y_i at the start: 0, or the full gradient at x0")
    local: Literal["adam", "rmsprop", "adamw"] = setting("adam", "local optimizer that takes the corrected gradient")

    def _second_moments(self) -> Vectors:
        return {"v": "d"} if self.local == "rmsprop" else {"v": "d", "vhat": "d"}

    def server_vectors(self) -> Vectors:
        return {"y": "d"}

    def client_vectors(self) -> Vectors:
        return {"y": "d", **self._second_moments()}

    def tracked_uploads(self) -> Vectors:
        return {"y": "d"}

    def local_moments(self) -> tuple[str, ...]:
        return ("v",) if self.local == "rmsprop" else ("m", "v")

    def needs_full_gradient(self) -> bool:
        return self.tracking_init == "gradient"

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        zeros = super().init_server(x, info)
        return zeros if gradient is None else {**zeros, "y": gradient.clone()}

    def init_clients(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        zeros = super().init_clients(x, info)
        return zeros if gradient is None else {**zeros, "y": gradient.clone()}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        moments = {} if self.local == "rmsprop" else {"m": rows_of(None, x)}
        moments |= {name: rows_of(clients[name], x) for name in self._second_moments()}
        return {"x": x.clone(), "correction": server["y"] - clients["y"], "g_sum": rows_of(None, x), **moments}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["g_sum"] += g
        gh = g + local["correction"]
        if self.local == "rmsprop":
            b2 = self.betas[1]
            local["v"].mul_(b2).addcmul_(gh, gh, value=1 - b2)
            direction = adam_direction(gh, local["v"], self.eps)
        else:
            update_moments(local, gh, self.betas)
            torch.maximum(local["vhat"], local["v"], out=local["vhat"])
            direction = adam_direction(local["m"], local["vhat"], self.eps)
        descend(local["x"], eta, direction, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        y, change = track(local["g_sum"] / rows.steps, clients["y"], rows)
        kept = {name: local[name] for name in self.client_vectors() if name != "y"}
        return {"d": local["x"] - x, "y": change}, {"y": y, **kept}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        y = server["y"] + reduced.total["y"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"y": y}
