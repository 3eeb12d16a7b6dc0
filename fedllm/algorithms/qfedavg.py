"""q-FedAvg: local SGD whose server listens more to the clients with a high loss, for q-fair federated learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedllm.algorithms.base import Algorithm, Reduced, RoundInfo, Rows, Vectors, descend
from fedllm.common.errors import UserError
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State

_LEAST = 1e-10  # added to the loss, as in the authors' code, so that 0 has a power below 0


@dataclass(frozen=True, kw_only=True)
class QFedAvg(Algorithm):
    """For k = 1..K:
        x_i -= eta (g + lambda x_i)
    Where F_i is the loss of the client's first batch at x:
        u_i = F_i^q d_i
        h_i = F_i^q + q F_i^(q-1) L ||d_i||^2
    Server, where U and H are the means of u_i and h_i:
        x += eta_g U / H

    L is 1/lr, the paper's estimate of the Lipschitz constant; u_i and h_i are those of Alg. 2, divided by L. A
    higher q gives more even losses over the clients; q = 0 is FedAvg with equal weights. *choice*: F_i is the loss of
    one batch, where the paper takes it over all of a client's data, which needs a pass more. The paper samples clients
    in proportion to their numbers of samples; here they are sampled evenly, and `weights: size` gives them these
    weights. q is 1, one of the values that the paper tries.
    """

    aliases: ClassVar = ("qffl",)
    paper: ClassVar = "Fair Resource Allocation in Federated Learning (Li et al., 2020), Alg. 2"
    start_loss: ClassVar = "loss"

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    q: float = setting(1.0, "how much a client's loss counts; 0 = not at all", symbol="q")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.q >= 0:
            raise UserError(f"q: found {self.q}, expected zero or more")

    def uploads(self) -> Vectors:
        return {"u": "d", "h": "1"}

    def personal_fault(self) -> str:
        return "a client's h counts the change of all coordinates"

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "loss": x.new_zeros(len(x), 1)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        d, loss = local["x"] - x, local["loss"] + _LEAST
        power, slope = loss**self.q, self.q * loss ** (self.q - 1)
        return {"u": power * d, "h": power + slope * d.square().sum(dim=1, keepdim=True) / self.lr}, {}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        return x + self.server_lr * reduced.mean["u"] / reduced.mean["h"], {}
