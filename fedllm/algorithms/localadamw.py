"""LocalAdamW: AdamW from scratch each round on the clients (FedAdamW paper, Alg. 1), with Table 7's aggregations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedllm.algorithms.base import (
    Algorithm,
    Reduced,
    RoundInfo,
    Rows,
    Vectors,
    adam_direction,
    descend,
    rows_of,
    update_moments,
)
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class LocalAdamW(Algorithm):
    """m = v = 0 at the start of a round. For k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        mh = m/(1-b1^k),  vh = v/(1-b2^k)
        x_i -= eta (mh/(sqrt(vh)+eps) + lambda x_i)
    Server:
        x += eta_g D

    *choice*: the weights decay. FW Alg. 1 prints "- lambda x" inside the step, x_i -= eta (... - lambda x_i), by which
    they would grow; FW's code decays, as AdamW does.

    With `aggregate` (Table 7) the server's mean of the clients' last m, v, both, or the block means of v starts the
    next round instead of 0. A moment that is carried over so is corrected by the step of the whole run, t' = t K + k,
    in place of k (FW Alg. 2, line 12): the local k would take a warm m for 1/(1-b1) times its size at k = 1. *choice*:
    K in t' is the most steps that a client takes.
    """

    aliases: ClassVar = ("fedit_adamw", "local_adamw")
    paper: ClassVar = (
        "FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization Guarantees "
        "for Federated Large Models, Alg. 1 and Table 7"
    )
    moment: ClassVar = "v"
    nonnegative: ClassVar = ("v",)

    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    weight_decay: float = setting(0.01, "decoupled weight decay", symbol="lambda")
    shared: Literal["none", "m", "v", "vm", "mean_v"] = setting("none", "moments the server averages", key="aggregate")
    blocks: Literal["hessian", "tensor", "elementwise"] = setting("hessian", "blocks of v under aggregate: mean_v")

    def server_vectors(self) -> Vectors:
        shared: dict[str, Vectors] = {
            "none": {}, "m": {"m": "d"}, "v": {"v": "d"}, "vm": {"m": "d", "v": "d"}, "mean_v": {"v": "B"}
        }  # fmt: skip
        return shared[self.shared]

    def uploads(self) -> Vectors:
        return {"d": "d", **self.server_vectors()}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        start = dict(server)
        if self.shared == "mean_v":
            start["v"] = info.blocks.expand(server["v"])
        return {"x": x.clone(), "m": rows_of(start.get("m"), x), "v": rows_of(start.get("v"), x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        (b1, b2), t = self.betas, info.earlier * info.local_steps + k
        update_moments(local, g, self.betas)
        mh = local["m"] / (1 - b1 ** (t if "m" in self.server_vectors() else k))
        vh = local["v"] / (1 - b2 ** (t if "v" in self.server_vectors() else k))
        descend(local["x"], eta, adam_direction(mh, vh, self.eps), self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        upload = {"d": local["x"] - x}
        for name, length in self.server_vectors().items():
            upload[name] = info.blocks.means(local[name]) if length == "B" else local[name]
        return upload, {}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        return x + self.server_lr * reduced.mean["d"], {name: reduced.mean[name] for name in server}
