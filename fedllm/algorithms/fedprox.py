"""FedProx: local SGD with a proximal term that holds each client near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, RoundInfo, descend
from fedllm.common.errors import UserError
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    """For k = 1..K, where x is the global model at the start of the round:
        x_i -= eta (g + mu (x_i - x) + lambda x_i)
    Server:
        x += eta_g D

    A step descends on f_i(x_i) + mu/2 ||x_i - x||^2 (eq. 2). *choice*: the number of local steps is fixed; the paper
    lets a client stop at an inexact solution. D weights the clients by their numbers of samples (`weights: size`), so
    that mu = 0 is FedAvg; the paper samples clients in that proportion and averages plainly. mu is 0.01, one of the
    values that the paper tries.
    """

    paper: ClassVar = "Federated Optimization in Heterogeneous Networks (Li et al., 2020), Alg. 2"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    weights: Literal["uniform", "size"] = setting("size", "weight of a client in the mean of the updates")
    mu: float = setting(0.01, "weight of the proximal term", symbol="mu")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu >= 0:
            raise UserError(f"mu: found {self.mu}, expected zero or more")

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "start": x}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g + self.mu * (local["x"] - local["start"]), self.weight_decay)
