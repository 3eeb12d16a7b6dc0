"""FedAvg-M: every local step is mixed with the last global direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Vectors, descend, require_fraction
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Algorithm):
    """Server keeps G, 0 at the start. For k = 1..K:
        u = beta g + (1-beta) G
        x_i -= eta (u + lambda x_i)
    Server:
        G = -D/(K eta)
        x += eta_g D

    *choice*: eta_g multiplies D, as in every algorithm here. The paper's server rate gamma multiplies G and is eta_g K
    eta. *choice*: K eta is the mean of the clients' sums of rates, where they take unequal steps.
    """

    aliases: ClassVar = ("fedavg_m",)
    paper: ClassVar = "Momentum Benefits Non-IID Federated Learning Simply and Provably (Cheng et al., 2024)"
    derivable: ClassVar = ("G",)

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    beta: float = setting(0.1, "weight of the new gradient beside the global direction G", symbol="beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "beta")

    def server_vectors(self) -> Vectors:
        return {"G": "d"}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "G": server["G"].expand_as(x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        u = self.beta * g + (1 - self.beta) * local["G"]
        descend(local["x"], eta, u, self.weight_decay)

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        G = -reduced.mean["d"] / reduced.rate_sum
        return x + self.server_lr * reduced.mean["d"], {"G": G}
