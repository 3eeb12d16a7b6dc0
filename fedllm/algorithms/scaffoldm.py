"""SCAFFOLD-M: SCAFFOLD's corrected gradient mixed with the last global direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import (
    Algorithm,
    Reduced,
    RoundInfo,
    Rows,
    Vectors,
    descend,
    require_fraction,
    rows_of,
    track,
)
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class ScaffoldM(Algorithm):
    """Server keeps c and G; client keeps c_i; all 0 at the start. For k = 1..K:
        u = beta (g - c_i + c) + (1-beta) G
        x_i -= eta (u + lambda x_i)
    Tracked clients, who send c_i' - c_i:
        c_i' = (1/K) sum_k g
    Server:
        G = -D/(K eta)
        x += eta_g D
        c += (1/N) sum_i (c_i' - c_i)

    c is the mean of all N clients' c_i after every round. *choice*: with tracked_per_round below clients_per_round the
    sum goes over the tracked clients, and the others keep their c_i, as in FAdamGC. *choice*: c_i' is the mean over the
    steps that the client takes, which may be fewer than K.

    *choice*: eta_g multiplies D, as in every algorithm here. The paper's server rate gamma multiplies G and is eta_g K
    eta. *choice*: K eta is the mean of the clients' sums of rates, where they take unequal steps.
    """

    aliases: ClassVar = ("scaffold_m",)
    paper: ClassVar = "Momentum Benefits Non-IID Federated Learning Simply and Provably (Cheng et al., 2024)"
    derivable: ClassVar = ("G",)

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    beta: float = setting(0.1, "weight of the corrected gradient beside the global direction G", symbol="beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "beta")

    def server_vectors(self) -> Vectors:
        return {"c": "d", "G": "d"}

    def client_vectors(self) -> Vectors:
        return {"c": "d"}

    def tracked_uploads(self) -> Vectors:
        return {"c": "d"}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        correction = server["c"] - clients["c"]
        return {"x": x.clone(), "correction": correction, "G": server["G"].expand_as(x), "g_sum": rows_of(None, x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["g_sum"] += g
        u = self.beta * (g + local["correction"]) + (1 - self.beta) * local["G"]
        descend(local["x"], eta, u, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        c, change = track(local["g_sum"] / rows.steps, clients["c"], rows)
        return {"d": local["x"] - x, "c": change}, {"c": c}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        G = -reduced.mean["d"] / reduced.rate_sum
        c = server["c"] + reduced.total["c"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"c": c, "G": G}
