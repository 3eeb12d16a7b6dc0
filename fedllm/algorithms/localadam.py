"""LocalAdam: Adam with a running maximum on the clients, averaging on the server (FedIT-Adam on LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, Vectors, adam_direction, descend, rows_of, update_moments
from fedllm.common.errors import UserError
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class LocalAdam(Algorithm):
    """Client keeps v_i and vhat_i, 0 at the start; m = 0 at the start of a round. For k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i)
    Server:
        x += eta_g D

    No bias correction: GC's analysis forgoes it. *choice*: eps is added to the root, as in GC Alg. 1 and
    torch.optim.Adam; GC eq. 2, 4 and Alg. 2 print it inside. *choice*: v_i and vhat_i persist between rounds (GC Alg.
    1, line 16; PT, line 24), as in FAdamGC, so that the two differ by the correction alone. `second_moment: reset`
    starts them at 0 each round. `amsgrad: false` has v in the place of vhat. `bias_correction: local` divides m by
    1-b1^k and the second moment by 1-b2^k. `decay: coupled` adds lambda x_i to g instead of to the step.

    The FedAdamW paper's "Local Adam" is another method: torch.optim.Adam, started anew each round (FW sec. Q2 and Table
    6). It is `{betas: [0.9, 0.999], weight_decay: 0.01, second_moment: reset, amsgrad: false, bias_correction: local,
    decay: coupled}`.
    """

    aliases: ClassVar = ("fedit_adam", "local_adam")
    paper: ClassVar = "Gradient Correction in Federated Learning with Adaptive Optimization, baseline LocalAdam"
    moment: ClassVar = "v"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    second_moment: Literal["persist", "reset"] = setting("persist", "keep v_i and vhat_i between rounds, or start at 0")
    amsgrad: bool = setting(True, "divide by the largest second moment so far, vhat, or by v")
    bias_correction: Literal["none", "local"] = setting("none", "correct both moments by the local k; needs reset")
    decay: Literal["decoupled", "coupled"] = setting("decoupled", "decay the weights, or add lambda x to the gradient")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction == "local" and self.second_moment == "persist":
            raise UserError(
                "bias_correction: found local, expected none while second_moment is persist: the local step k counts "
                "from the start of the round, where only a second moment that is reset starts; set second_moment: reset"
            )

    def _second_moments(self) -> Vectors:
        return {"v": "d", "vhat": "d"} if self.amsgrad else {"v": "d"}

    def client_vectors(self) -> Vectors:
        return self._second_moments() if self.second_moment == "persist" else {}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        second = {name: rows_of(clients.get(name), x) for name in self._second_moments()}
        return {"x": x.clone(), "m": rows_of(None, x), **second}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        decay = self.weight_decay
        if self.decay == "coupled":
            g, decay = g + decay * local["x"], 0.0
        update_moments(local, g, self.betas)
        m, v = local["m"], local["v"]
        if self.amsgrad:
            v = torch.maximum(local["vhat"], v, out=local["vhat"])
        if self.bias_correction == "local":
            b1, b2 = self.betas
            m, v = m / (1 - b1**k), v / (1 - b2**k)
        descend(local["x"], eta, adam_direction(m, v, self.eps), decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        return {"d": local["x"] - x}, {name: local[name] for name in self.client_vectors()}
