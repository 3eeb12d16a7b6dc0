"""FAdamGC-B: FAdamGC whose second moment starts each round from the server's block means, as FedAdamW's does."""

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
    track,
    update_moments,
)
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FAdamGCB(Algorithm):
    """Server keeps y and vbar; client keeps y_i only. m = 0 and vhat = v = expand(vbar) at the start of a round.
    For k = 1..K:
        gh = g + y - y_i
        m = b1 m + (1-b1) gh
        v = b2 v + (1-b2) gh^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + lambda x_i)
    Clients send d_i and vbar_i, the block means of v; tracked clients also y_i' - y_i:
        y_i' = (1/K) sum_k g, of the raw gradients
    Server:
        x += eta_g D
        y += (1/N) sum_{i in T} (y_i' - y_i)
        vbar = mean_i vbar_i
    At the start vbar = 0 and y_i = y = 0; with `tracking_init: gradient`
        y_i = full local gradient at x0,  y = mean_i y_i

    Ours: no per-client second moment to store. y is the mean of all N clients' y_i after every round. As in FAdamGC,
    there is no bias correction, eps is added to the root, and y_i starts at 0 by default. *choice*: the maximum spans a
    round, not the run, so vbar may fall again.
    """

    aliases: ClassVar = ("fadamgt_b", "fedit_adamgt_b")
    paper: ClassVar = "ours: FAdamGC's correction with FedAdamW's block means of v"
    moment: ClassVar = "v"
    nonnegative: ClassVar = ("vbar",)

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    tracking_init: Literal["zero", "gradient"] = setting("zero", "y_i at the start: 0, or the full gradient at x0")
    blocks: Literal["hessian", "tensor", "elementwise"] = setting(
        "hessian", "coordinates that share one number of vbar"
    )

    def server_vectors(self) -> Vectors:
        return {"y": "d", "vbar": "B"}

    def client_vectors(self) -> Vectors:
        return {"y": "d"}

    def uploads(self) -> Vectors:
        return {"d": "d", "vbar": "B"}

    def tracked_uploads(self) -> Vectors:
        return {"y": "d"}

    def needs_full_gradient(self) -> bool:
        return self.tracking_init == "gradient"

    def init_server(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        zeros = super().init_server(x, info)
        return zeros if gradient is None else {**zeros, "y": gradient.clone()}

    def init_clients(self, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> State:
        zeros = super().init_clients(x, info)
        return zeros if gradient is None else {**zeros, "y": gradient.clone()}

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        start = info.blocks.expand(server["vbar"])
        moments = {"m": rows_of(None, x), "v": rows_of(start, x), "vhat": rows_of(start, x)}
        return {"x": x.clone(), "correction": server["y"] - clients["y"], "g_sum": rows_of(None, x), **moments}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["g_sum"] += g
        gh = g + local["correction"]
        update_moments(local, gh, self.betas)
        torch.maximum(local["vhat"], local["v"], out=local["vhat"])
        descend(local["x"], eta, adam_direction(local["m"], local["vhat"], self.eps), self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        y, change = track(local["g_sum"] / rows.steps, clients["y"], rows)
        return {"d": local["x"] - x, "vbar": info.blocks.means(local["v"]), "y": change}, {"y": y}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        y = server["y"] + reduced.total["y"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"y": y, "vbar": reduced.mean["vbar"]}
