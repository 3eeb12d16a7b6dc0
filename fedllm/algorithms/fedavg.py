"""FedAvg: local SGD, the server takes the mean of the updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, RoundInfo, descend

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Server:
        x += eta_g D
    """

    aliases: ClassVar = ("fedit", "localsgd")
    paper: ClassVar = "Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)"

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)
