"""FedAvg: local SGD, the server takes the mean of the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, RoundInfo, descend
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Server:
        x += eta_g D

    D weights the clients by their numbers of samples (`weights: size`), as Alg. 1 of the paper does. *choice*: the
    default learning rate is 0.1, as for every algorithm with local SGD steps; the paper tunes it for each task.
    """

    aliases: ClassVar = ("fedit", "localsgd")
    paper: ClassVar = "Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    weights: Literal["uniform", "size"] = setting("size", "weight of a client in the mean of the updates")

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)
