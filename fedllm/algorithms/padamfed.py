"""PAdaMFed (base form): normalised momentum with control variates, its rates free of the problem's constants."""

from __future__ import annotations

import math
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
    require_positive,
    rows_of,
    track,
)
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class PAdaMFed(Algorithm):
    """Server keeps c and G; client keeps c_i; all 0 at the start. For k = 1..K:
        u = beta (g - c_i + c) + (1-beta) G
        x_i -= eta (u/||u|| + lambda x_i)
    Tracked clients, who send c_i' - c_i:
        c_i' = (1/K) sum_k g
    Server:
        x += eta_g (gamma/(eta K)) D
        G = beta (mean_i (c_i' - c_i) + c) + (1-beta) G
        c += (1/N) sum_i (c_i' - c_i)
    Unless given, in a run of T_total rounds:
        beta = min(1, sqrt(S K/T_total))
        gamma = (S K)^(1/4)/T_total^(3/4)
        eta = 1/(K (S K T_total)^(1/4))

    ||u|| is one L2 norm over the whole vector, and 0/||0|| is 0. c is the mean of all N clients' c_i after every round,
    and without weight decay x moves by at most eta_g gamma per round. *choice*: with tracked_per_round below
    clients_per_round both the mean and the sum of the changes go over the tracked clients (an unbiased estimate of the
    mean over the sampled ones), and the others keep their c_i; if nobody is tracked the mean is 0. That mean has equal
    weights whatever `weights` says. *choice*: K in the default formulas is the most steps that a client takes, and eta
    K in the server's step the mean of the clients' sums of rates. server_lr multiplies gamma, and schedules multiply
    eta.
    """

    paper: ClassVar = "Problem-Parameter-Free Federated Learning (Yan et al., 2025)"

    lr: float | None = setting(None, "local learning rate, by default from S, K and T_total", symbol="eta")  # type: ignore[assignment]
    beta: float | None = setting(
        None, "weight of the corrected gradient, by default from S, K and T_total", symbol="beta"
    )
    gamma: float | None = setting(None, "length of the global step, by default from S, K and T_total", symbol="gamma")
    total_rounds: int | None = setting(None, "rounds in the defaults, by default the run's", symbol="T_total")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "beta")
        require_positive(self, "gamma", "total_rounds")

    def server_vectors(self) -> Vectors:
        return {"c": "d", "G": "d"}

    def client_vectors(self) -> Vectors:
        return {"c": "d"}

    def tracked_uploads(self) -> Vectors:
        return {"c": "d"}

    def depends_on_total(self) -> str:
        unset = [name for name in ("lr", "beta", "gamma") if getattr(self, name) is None]
        by_default = "" if self.total_rounds else ", ".join(f"{name}=null" for name in unset)
        return super().depends_on_total() or by_default

    def free_rates(self, info: RoundInfo) -> tuple[float, float, float]:
        """(beta, gamma, eta): each as set, or by its default formula."""
        SK, K = info.sampled * info.local_steps, info.local_steps
        T_total = self.total_rounds or math.ceil(info.total / info.turns)
        beta = min(1.0, (SK / T_total) ** 0.5) if self.beta is None else self.beta
        gamma = SK**0.25 / T_total**0.75 if self.gamma is None else self.gamma
        eta = 1 / (K * (SK * T_total) ** 0.25) if self.lr is None else self.lr
        return beta, gamma, eta

    def base_rate(self, info: RoundInfo) -> float:
        return self.free_rates(info)[2]

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        correction = server["c"] - clients["c"]
        return {"x": x.clone(), "correction": correction, "G": server["G"].expand_as(x), "g_sum": rows_of(None, x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["g_sum"] += g
        beta, _, _ = self.free_rates(info)
        u = beta * (g + local["correction"]) + (1 - beta) * local["G"]
        length = torch.linalg.vector_norm(u, dim=1, keepdim=True)
        descend(local["x"], eta, torch.where(length > 0, u / length, u), self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        c, change = track(local["g_sum"] / rows.steps, clients["c"], rows)
        return {"d": local["x"] - x, "c": change}, {"c": c}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        beta, gamma, _ = self.free_rates(info)
        change = reduced.total["c"] / max(1, reduced.tracked)
        G = beta * (change + server["c"]) + (1 - beta) * server["G"]
        c = server["c"] + reduced.total["c"] / info.num_clients
        return x + self.server_lr * (gamma / reduced.rate_sum) * reduced.mean["d"], {"c": c, "G": G}
