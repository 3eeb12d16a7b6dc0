"""FedLADA: local AMSGrad from a shared second moment, amended by the last global direction."""

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
    require_fraction,
    rows_of,
    update_moments,
)
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedLADA(Algorithm):
    """Server keeps v, eps^2 at the start, and ga, 0 at the start. m = 0 and vhat = v = the server's v; for k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        vhat = max(vhat, v)
        x_i -= eta (a m/sqrt(vhat) + (1-a) ga + lambda x_i)
    Clients send d_i and vhat_i. Server:
        x += eta_g D
        v = mean_i vhat_i
        ga = -D/(K eta)

    No bias correction. *choice*: beta2 is 0.99 by default, as for the other methods with a running maximum; the
    FedAdamW paper runs FedLADA with 0.999. *choice*: K eta is the mean of the clients' sums of rates, where they take
    unequal steps.
    """

    paper: ClassVar = (
        "Efficient Federated Learning via Local Adaptive Amended Optimizer with Linear Speedup (Sun et al., 2023)"
    )
    derivable: ClassVar = ("ga",)
    moment: ClassVar = "v"
    nonnegative: ClassVar = ("vhat",)

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "root of the server's first v", symbol="eps")
    alpha: float = setting(0.5, "weight of the local direction beside the global one", symbol="a")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "alpha")

    def server_vectors(self) -> Vectors:
        return {"v": "d", "ga": "d"}

    def uploads(self) -> Vectors:
        return {"d": "d", "vhat": "d"}

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        return {"v": torch.full_like(x, self.eps**2), "ga": torch.zeros_like(x)}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        v, vhat = rows_of(server["v"], x), rows_of(server["v"], x)
        return {"x": x.clone(), "m": rows_of(None, x), "v": v, "vhat": vhat, "ga": server["ga"].expand_as(x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        update_moments(local, g, self.betas)
        torch.maximum(local["vhat"], local["v"], out=local["vhat"])
        direction = self.alpha * adam_direction(local["m"], local["vhat"], 0.0) + (1 - self.alpha) * local["ga"]
        descend(local["x"], eta, direction, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        return {"d": local["x"] - x, "vhat": local["vhat"]}, {}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        ga = -reduced.mean["d"] / reduced.rate_sum
        return x + self.server_lr * reduced.mean["d"], {"v": reduced.mean["vhat"], "ga": ga}
