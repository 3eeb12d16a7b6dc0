"""FA-NT (FAdamET, FedIT-AdamET): the correction is added to Adam's direction, not to the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
class FANT(Algorithm):
    """Server keeps y; client keeps y_i, v_i, vhat_i; all 0 at the start; m = 0 at the start of a round. For k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + y - y_i + lambda x_i)
    Tracked clients, who send y_i' - y_i:
        y_i' = y_i - y + (x - x_i)/(K eta)
    Server:
        x += eta_g D
        y += (1/N) sum_{i in T} (y_i' - y_i)

    No bias correction. y_i' is the mean of the Adam directions (under weight decay, of direction + lambda x_i; under a
    rate that changes within the round, weighted by it). y is the mean of all N clients' y_i after every round.
    """

    aliases: ClassVar = ("fadamet", "fedit_adamet")
    paper: ClassVar = "Parameter Tracking in Federated Learning with Adaptive Optimization, FAdamET"
    moment: ClassVar = "v"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")

    def server_vectors(self) -> Vectors:
        return {"y": "d"}

    def client_vectors(self) -> Vectors:
        return {"y": "d", "v": "d", "vhat": "d"}

    def tracked_uploads(self) -> Vectors:
        return {"y": "d"}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        v, vhat = rows_of(clients["v"], x), rows_of(clients["vhat"], x)
        return {"x": x.clone(), "m": rows_of(None, x), "v": v, "vhat": vhat, "correction": server["y"] - clients["y"]}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        update_moments(local, g, self.betas)
        torch.maximum(local["vhat"], local["v"], out=local["vhat"])
        direction = adam_direction(local["m"], local["vhat"], self.eps) + local["correction"]
        descend(local["x"], eta, direction, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        d = local["x"] - x
        y, change = track(clients["y"] - server["y"] - d / rows.rate_sum, clients["y"], rows)
        return {"d": d, "y": change}, {"y": y, "v": local["v"], "vhat": local["vhat"]}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        y = server["y"] + reduced.total["y"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"y": y}
