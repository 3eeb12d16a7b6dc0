"""FedAdam: local SGD, Adam on the server with D as its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Vectors, adam_direction, descend, require_positive
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAdam(Algorithm):
    """Server keeps m and v, 0 at the start. For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Server:
        m = b1 m + (1-b1) D
        v = b2 v + (1-b2) D^2
        x += eta_g m/(sqrt(v)+tau)

    m and v never leave the server. *choice*: no bias correction, as Alg. 2 prints; with `bias_correction`, round t = 0,
    1, ... divides m by 1-b1^(t+1) and v by 1-b2^(t+1). *choice*: v starts at 0, and the paper starts it at tau^2 or
    more, which would count tau twice in the first rounds. GC runs FedAdam with tau = 1e-8.
    """

    paper: ClassVar = "Adaptive Federated Optimization (Reddi et al., 2021), Alg. 2"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the server's two moments", symbol="b1, b2")
    tau: float = setting(1e-3, "degree of adaptivity, added to the root", symbol="tau")
    bias_correction: bool = setting(False, "correct the two moments for their start at 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "tau")

    def server_vectors(self) -> Vectors:
        return {"m": "d", "v": "d"}

    def downloads(self) -> Vectors:
        return {}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        D, (b1, b2) = reduced.mean["d"], self.betas
        m = b1 * server["m"] + (1 - b1) * D
        v = b2 * server["v"] + (1 - b2) * D.square()
        t = info.earlier + 1
        mh, vh = (m / (1 - b1**t), v / (1 - b2**t)) if self.bias_correction else (m, v)
        return x + self.server_lr * adam_direction(mh, vh, self.tau), {"m": m, "v": v}
