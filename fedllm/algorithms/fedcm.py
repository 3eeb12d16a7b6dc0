"""FedCM: client-level momentum, the gradient mixed with the last global direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Vectors, descend, require_fraction
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedCM(Algorithm):
    """Server keeps Delta, 0 at the start. For k = 1..K:
        u = a g + (1-a) Delta
        x_i -= eta (u + lambda x_i)
    Server:
        Delta = -D/(K eta)
        x += eta_g D

    *choice*: eta_g multiplies D, as in every algorithm here; a server rate that multiplies Delta is eta_g K eta.
    *choice*: K eta is the mean of the clients' sums of rates, where they take unequal steps.
    """

    paper: ClassVar = "FedCM: Federated Learning with Client-level Momentum (Xu et al., 2021)"
    derivable: ClassVar = ("Delta",)

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    alpha: float = setting(0.1, "weight of the new gradient beside the global direction Delta", symbol="a")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "alpha")

    def server_vectors(self) -> Vectors:
        return {"Delta": "d"}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "Delta": server["Delta"].expand_as(x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        u = self.alpha * g + (1 - self.alpha) * local["Delta"]
        descend(local["x"], eta, u, self.weight_decay)

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        Delta = -reduced.mean["d"] / reduced.rate_sum
        return x + self.server_lr * reduced.mean["d"], {"Delta": Delta}
