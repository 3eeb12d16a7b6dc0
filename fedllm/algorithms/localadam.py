"""LocalAdam: Adam with a running maximum on the clients, averaging on the server (FedIT-Adam on LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, Vectors, adam_direction, descend, rows_of, update_moments
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class LocalAdam(Algorithm):
    """Client keeps v_i and vhat_i, 0 at the start; m = 0 at the start of a round. For k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i)
    Server:
        x += eta_g D

    No bias correction. *choice*: v_i and vhat_i persist between rounds (GC Alg. 1, line 16; PT, line 24);
    `second_moment: reset` starts them at 0 each round.
    """

    aliases: ClassVar = ("fedit_adam", "local_adam")
    paper: ClassVar = "Gradient Correction in Federated Learning with Adaptive Optimization, baseline LocalAdam"
    moment: ClassVar = "v"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    second_moment: Literal["persist", "reset"] = setting("persist", "keep v_i and vhat_i between rounds, or start at 0")

    def client_vectors(self) -> Vectors:
        return {"v": "d", "vhat": "d"} if self.second_moment == "persist" else {}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        v, vhat = (rows_of(clients.get(name), x) for name in ("v", "vhat"))
        return {"x": x.clone(), "m": rows_of(None, x), "v": v, "vhat": vhat}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        update_moments(local, g, self.betas)
        torch.maximum(local["vhat"], local["v"], out=local["vhat"])
        descend(local["x"], eta, adam_direction(local["m"], local["vhat"], self.eps), self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        return {"d": local["x"] - x}, {name: local[name] for name in self.client_vectors()}
