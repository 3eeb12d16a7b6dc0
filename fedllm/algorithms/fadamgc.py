"""FAdamGC (FAdamGT, FedIT-AdamGT): the gradient is corrected before Adam's moments, not the weights after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedllm.algorithms.base import (
    Algorithm,
    Reduced,
    RoundInfo,
    Rows,
    State,
    Vectors,
    adamw_step,
    ratio,
    rows_of,
    tracked_mean,
    update_moments,
)
from fedllm.settings import setting


@dataclass(frozen=True, kw_only=True)
class FAdamGC(Algorithm):
    """Server keeps y; client keeps y_i, v_i, vhat_i; m = 0 at the start of a round; for k = 1..K:
    gh = g + y - y_i;  m = b1 m + (1-b1) gh;  v = b2 v + (1-b2) gh^2;  vhat = max(vhat, v);
    x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i).
    Tracked clients: y_i' = (1/K) sum_k g, of the raw gradients; they send y_i' - y_i.
    Server: x += eta_g D;  y += (1/N) sum_{i in T} (y_i' - y_i).

    y is the mean of all N clients' y_i after every round. `local` (GC App. J): rmsprop has no first moment and no
    maximum, and v_i persists; adamw is LocalAdamW's step on gh, from m = v = 0.
    """

    aliases: ClassVar = ("fadamgt", "fedit_adamgt", "fedit_adamgc")
    paper: ClassVar = "Gradient Correction in Federated Learning with Adaptive Optimization, Alg. 1 and App. J"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="beta1, beta2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    tracking_init: Literal["zero", "gradient"] = setting("zero", "y_i at the start: 0, or the full gradient at x0")
    local: Literal["adam", "rmsprop", "adamw"] = setting("adam", "local optimizer that takes the corrected gradient")

    def server_vectors(self) -> Vectors:
        return {"y": "d"}

    def client_vectors(self) -> Vectors:
        persistent: dict[str, Vectors] = {"adam": {"v": "d", "vhat": "d"}, "rmsprop": {"v": "d"}, "adamw": {}}
        return {"y": "d", **persistent[self.local]}

    def tracked_uploads(self) -> Vectors:
        return {"y": "d"}

    def needs_full_gradient(self) -> bool:
        return self.tracking_init == "gradient"

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        return {"y": torch.zeros_like(x) if gradient is None else gradient.clone()}

    def init_clients(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        zeros = super().init_clients(x, info)
        return zeros if gradient is None else {**zeros, "y": gradient.clone()}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        local = {name: rows_of(clients.get(name), x) for name in ("v", "vhat")}
        correction = server["y"] - clients["y"]
        return {"x": x.clone(), "m": rows_of(None, x), **local, "correction": correction, "g_sum": rows_of(None, x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["g_sum"] += g
        gh = g + local["correction"]
        if self.local == "adamw":
            adamw_step(local, gh, k, eta, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
            return
        update_moments(local, gh, self.betas)
        if self.local == "rmsprop":
            direction = ratio(gh, local["v"].sqrt(), self.eps)
        else:
            torch.maximum(local["vhat"], local["v"], out=local["vhat"])
            direction = ratio(local["m"], local["vhat"].sqrt(), self.eps)
        local["x"] -= eta * (direction + self.weight_decay * local["x"])

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        y, change = tracked_mean(local["g_sum"], clients["y"], rows)
        kept = {name: local[name] for name in self.client_vectors() if name != "y"}
        return {"d": local["x"] - x, "y": change}, {"y": y, **kept}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        y = server["y"] + reduced.total["y"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"y": y}
