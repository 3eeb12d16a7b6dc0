"""FedDyn: local SGD on an objective that each client corrects by its own past updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Rows, Vectors, descend, require_positive
from fedllm.common.errors import UserError
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    """Server keeps h; client keeps h_i; both 0 at the start. For k = 1..K, where x is the global model at the start:
        x_i -= eta (g - h_i + alpha (x_i - x) + lambda x_i)
        h_i' = h_i - alpha d_i
    Server:
        h' = h - alpha (1/N) sum_{i in S} d_i
        x += eta_g D - h'/alpha

    A client descends on f_i(x_i) - <h_i, x_i> + alpha/2 ||x_i - x||^2. h is the mean of all N clients' h_i after every
    round, and where the clients agree on x, h_i is client i's gradient there. *choice*: K local steps stand for the
    paper's minimisation. eta_g scales D, which the paper takes whole. alpha is 0.1, one of the values that the paper
    tries.
    """

    paper: ClassVar = "Federated Learning Based on Dynamic Regularization (Acar et al., 2021), Alg. 1"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    alpha: float = setting(0.1, "weight of the quadratic term", symbol="alpha")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "alpha")
        if self.weights != "uniform":
            raise UserError(
                f"weights: found {self.weights}, expected uniform: the server's h is the plain mean of the clients' h_i"
            )

    def server_vectors(self) -> Vectors:
        return {"h": "d"}

    def client_vectors(self) -> Vectors:
        return {"h": "d"}

    def downloads(self) -> Vectors:
        return {}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "start": x, "h": clients["h"]}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        direction = g - local["h"] + self.alpha * (local["x"] - local["start"])
        descend(local["x"], eta, direction, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        d = local["x"] - x
        return {"d": d}, {"h": clients["h"] - self.alpha * d}

    def keep(self, kept: State, before: State, sent: State) -> State:
        return {"h": before["h"] - self.alpha * sent["d"]}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        D = reduced.mean["d"]
        h = server["h"] - self.alpha * (reduced.clients / info.num_clients) * D
        return x + self.server_lr * D - h / self.alpha, {"h": h}
