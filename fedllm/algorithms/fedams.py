"""FedAMS: local SGD, AMSGrad on the server with D as its gradient and a floor under its second moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Vectors, adam_direction, descend, require_positive
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAMS(Algorithm):
    """Server keeps m, v and vhat, 0 at the start. For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Server:
        m = b1 m + (1-b1) D
        v = b2 v + (1-b2) D^2
        vhat = max(vhat, v, floor)
        x += eta_g m/(sqrt(vhat)+eps)          option 2
        x += eta_g m/sqrt(max(vhat, eps))      option 1

    m, v and vhat never leave the server. No bias correction, as in the paper. *choice*: the floor holds under both
    options, so that these differ in the place of eps alone. The paper's option 1 has one number in place of floor and
    eps, the larger of the two. GC runs FedAMS with 1e-8 for eps and floor.
    """

    paper: ClassVar = "Communication-Efficient Adaptive Federated Learning (Wang et al., 2022), Alg. 1"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the server's two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root; under option 1 the least value below it", symbol="eps")
    floor: float = setting(1e-3, "least value of vhat", symbol="floor")
    option: Literal[1, 2] = setting(2, "eps inside the root, or added to it")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "floor")

    def server_vectors(self) -> Vectors:
        return {"m": "d", "v": "d", "vhat": "d"}

    def downloads(self) -> Vectors:
        return {}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        D, (b1, b2) = reduced.mean["d"], self.betas
        m = b1 * server["m"] + (1 - b1) * D
        v = b2 * server["v"] + (1 - b2) * D.square()
        vhat = torch.maximum(server["vhat"], v).clamp(min=self.floor)
        if self.option == 2:
            direction = adam_direction(m, vhat, self.eps)
        else:
            direction = adam_direction(m, vhat.clamp(min=self.eps), 0.0)
        return x + self.server_lr * direction, {"m": m, "v": v, "vhat": vhat}
