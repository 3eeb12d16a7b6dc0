"""FedAdagrad: local SGD, Adagrad on the server with D as its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Vectors, adam_direction, descend, require_positive
from fedllm.common.errors import UserError
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Algorithm):
    """Server keeps m, 0 at the start, and v, tau^2 at the start. For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Server:
        m = b1 m + (1-b1) D
        v = v + D^2
        x += eta_g m/(sqrt(v)+tau)

    m and v never leave the server. b1 = 0, as in the paper's experiments: m is then D. *choice*: v starts at tau^2, the
    least value that the paper allows.
    """

    paper: ClassVar = "Adaptive Federated Optimization (Reddi et al., 2021), Alg. 2"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    beta: float = setting(0.0, "decay of the server's first moment", symbol="b1")
    tau: float = setting(1e-3, "degree of adaptivity, added to the root", symbol="tau")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "tau")
        if not 0 <= self.beta < 1:
            raise UserError(f"beta: found {self.beta}, expected a number in [0, 1)")

    def server_vectors(self) -> Vectors:
        return {"m": "d", "v": "d"}

    def downloads(self) -> Vectors:
        return {}

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        return {"m": torch.zeros_like(x), "v": torch.full_like(x, self.tau**2)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        D = reduced.mean["d"]
        m = self.beta * server["m"] + (1 - self.beta) * D
        v = server["v"] + D.square()
        return x + self.server_lr * adam_direction(m, v, self.tau), {"m": m, "v": v}
