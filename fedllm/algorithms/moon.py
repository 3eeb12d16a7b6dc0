"""MOON: local SGD whose loss draws each sample's representation to that of the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, Contrast, RoundInfo, Rows, Vectors, descend, require_positive
from fedllm.common.errors import UserError
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class Moon(Algorithm):
    """For k = 1..K, where g_c is the gradient of the batch's mean of c, see below:
        x_i -= eta (g + mu g_c + lambda x_i)
    After the last step:
        w_i = x_i
    Server:
        x += eta_g D
    Where z, z_x and z_w are a sample's representations in the models x_i, x and w_i, the inputs of their last layers:
        c = log(1 + exp((cos(z, z_w) - cos(z, z_x)) / tau))

    c is the model-contrastive loss of eq. 3: z is drawn to the representation in the global model x of the start of the
    round, and away from that in the client's own model of its last round. w_i starts at x0. D weights the clients by
    their numbers of samples (`weights: size`), so that mu = 0 is FedAvg. mu is 1, one of the values that the paper
    tries. *choice*: the paper puts a projection of two layers before the last one; here a model keeps its own layers,
    so that it loads anywhere. *choice*: dropout drops the same in all three models. *choice*: the paper's local steps
    have momentum 0.9; these are plain SGD. A step needs two more forward passes.
    """

    paper: ClassVar = "Model-Contrastive Federated Learning (Li et al., 2021), Alg. 1 and eq. 3"
    contrastive: ClassVar = True

    lr: float = setting(0.1, "local learning rate", symbol="eta")
    weights: Literal["uniform", "size"] = setting("size", "weight of a client in the mean of the updates")
    mu: float = setting(1.0, "weight of the contrast", symbol="mu")
    temperature: float = setting(0.5, "temperature of the contrast", symbol="tau")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "temperature")
        if not self.mu >= 0:
            raise UserError(f"mu: found {self.mu}, expected zero or more")

    def client_vectors(self) -> Vectors:
        return {"w": "d"}

    def init_clients(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        return {"w": x.clone()}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        return {"x": x.clone(), "start": x, "w": clients["w"]}

    def contrast(self, local: State) -> Contrast:
        return Contrast(local["start"], local["w"], self.mu, self.temperature)

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        descend(local["x"], eta, g, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        return {"d": local["x"] - x}, {"w": local["x"].clone()}
