"""SCAFFOLD (option II): a control variate on each client cancels its drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Rows, Vectors, descend, track
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    """Server keeps c; client keeps c_i; both 0 at the start. For k = 1..K:
        x_i -= eta (g + c - c_i + lambda x_i)
    Tracked clients, who send c_i' - c_i:
        c_i' = c_i - c + (x - x_i)/(K eta)
    Server:
        x += eta_g D
        c += (1/N) sum_i (c_i' - c_i)

    c is the mean of all N clients' c_i after every round. *choice*: with tracked_per_round below clients_per_round the
    sum goes over the tracked clients, and the others keep their c_i, as in FAdamGC. *choice*: K eta in c_i' is the sum
    of the rates that the client really used, so that c_i' stays the mean of its gradients under schedules and with
    fewer than K steps (under weight decay, of g + lambda x_i).
    """

    paper: ClassVar = (
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., 2020), option II"
    )

    lr: float = setting(0.1, "local learning rate", symbol="eta")

    def server_vectors(self) -> Vectors:
        return {"c": "d"}

    def client_vectors(self) -> Vectors:
        return {"c": "d"}

    def tracked_uploads(self) -> Vectors:
        return {"c": "d"}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "correction": server["c"] - clients["c"]}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g + local["correction"], self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        d = local["x"] - x
        c, change = track(clients["c"] - server["c"] - d / rows.rate_sum, clients["c"], rows)
        return {"d": d, "c": change}, {"c": c}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        c = server["c"] + reduced.total["c"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"c": c}
