"""FA-NT (FAdamET, FedIT-AdamET): the correction is added to Adam's direction, not to the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from fedllm.common.errors import RunError, UserError
from fedllm.common.lazy import torch
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FANT(Algorithm):
    """Server keeps y; client keeps y_i, v_i, vhat_i; all 0 at the start; m = 0 at the start of a round. For k = 1..K:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        vhat = max(vhat, v)
        x_i -= eta (m/(sqrt(vhat)+eps) + y - y_i + lambda x_i)
    Tracked clients, who send y_i' - y_i:
        y_i' = y_i - y + (x - x_i)/(K eta)
    Server:
        x += eta_g D
        y += (1/N) sum_{i in T} (y_i' - y_i)
    With `form: one_vector` (GC eq. 65-66) in place of y and y_i, z_i = y_i - y, 0 at the start; x' is the next x:
        z_i' = z_i + (x' - x_i)/(K eta)

    No bias correction: GC's analysis forgoes it. y_i' is the mean of the Adam directions (under weight decay, of
    direction + lambda x_i; under a rate that changes within the round, weighted by it). y is the mean of all N clients'
    y_i after every round.

    *choice*: eps is added to the root, as in GC Alg. 1 and torch.optim.Adam. GC eq. 2, 4 and Alg. 2 print it inside the
    root, where 1e-8 keeps the root above 1e-4. *choice*: tracked and untracked clients keep v_i and vhat_i, as PT
    prints; GC Alg. 1 has that line under `else`. *choice*: K eta is the sum of the rates that the client really used,
    so that y_i' stays the mean of its directions under schedules and with fewer than K steps.

    `form: one_vector` computes the same x and sends it alone, in both directions. It holds where y' = (x - x')/(K eta):
    all N clients are sampled and tracked in every round, take equally many local steps and have equal weights, and
    eta_g = 1. Anything else is an error, also an upload that is rejected. Until it receives x', the client keeps
    w_i = z_i - x_i/(K eta).
    """

    aliases: ClassVar = ("fadamet", "fedit_adamet")
    paper: ClassVar = (
        "Parameter Tracking in Federated Learning with Adaptive Optimization, FAdamET; Gradient Correction in "
        "Federated Learning with Adaptive Optimization, FA-NT"
    )
    moment: ClassVar = "v"

    betas: tuple[float, float] = setting((0.9, 0.99), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    form: Literal["tracked", "one_vector"] = setting(
        "tracked", "keep and send y and y_i, or keep y_i - y and send x alone"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "one_vector":
            for name, expected in (("server_lr", 1.0), ("weights", "uniform")):
                if (found := getattr(self, name)) != expected:
                    raise UserError(
                        f"{name}: found {found}, expected {expected} with form=one_vector, where y is worked out from "
                        "the change of x; or set form=tracked"
                    )

    def check(self, info: RoundInfo, steps: Sequence[int] = ()) -> None:
        if self.form == "tracked":
            return
        for name, found in (("clients_per_round", info.sampled), ("tracked_per_round", info.tracked)):
            if found != info.num_clients:
                raise UserError(
                    f"{name}: found {found}, expected {info.num_clients}, all clients, with algorithm.form=one_vector; "
                    "or set algorithm.form=tracked"
                )
        if other := [count for count in steps if count != info.local_steps]:
            raise UserError(
                f"algorithm.form: found one_vector with a client that takes {other[0]} local steps, expected "
                f"{info.local_steps} from every client; set local.steps instead of local.epochs, or form=tracked"
            )

    def server_vectors(self) -> Vectors:
        return {"y": "d"} if self.form == "tracked" else {}

    def client_vectors(self) -> Vectors:
        return {"y" if self.form == "tracked" else "w": "d", "v": "d", "vhat": "d"}

    def tracked_uploads(self) -> Vectors:
        return {"y": "d"} if self.form == "tracked" else {}

    def personal_fault(self) -> str:
        one = "form=one_vector works out y from all of x; set algorithm.form=tracked"
        return one if self.form == "one_vector" else super().personal_fault()

    def computable(self, info: RoundInfo, equal_steps: bool) -> tuple[str, ...]:
        everyone = info.sampled == info.tracked == info.num_clients
        alike = equal_steps and self.weights == "uniform" and self.server_lr == 1
        return ("y",) if self.form == "tracked" and everyone and alike else ()

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        v, vhat = rows_of(clients["v"], x), rows_of(clients["vhat"], x)
        correction = server["y"] - clients["y"] if self.form == "tracked" else -self._z(x, clients, info)
        return {"x": x.clone(), "m": rows_of(None, x), "v": v, "vhat": vhat, "correction": correction}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        update_moments(local, g, self.betas)
        torch.maximum(local["vhat"], local["v"], out=local["vhat"])
        direction = adam_direction(local["m"], local["vhat"], self.eps) + local["correction"]
        descend(local["x"], eta, direction, self.weight_decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        d, moments = local["x"] - x, {"v": local["v"], "vhat": local["vhat"]}
        if self.form == "one_vector":
            K_eta = self._same_rate_sum(rows, info)
            return {"d": d}, {"w": -local["correction"] - local["x"] / K_eta, **moments}
        y, change = track(clients["y"] - server["y"] - d / rows.rate_sum, clients["y"], rows)
        return {"d": d, "y": change}, {"y": y, **moments}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        if self.form == "one_vector":
            _require_everyone(reduced, info)
            return x + reduced.mean["d"], {}
        y = server["y"] + reduced.total["y"] / info.num_clients
        return x + self.server_lr * reduced.mean["d"], {"y": y}

    def _z(self, x: Tensor, clients: State, info: RoundInfo) -> Tensor:
        """z_i [C, d] = w_i + x/(K eta), with the K eta of the round before; 0 in the first round."""
        if info.earlier == 0:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        before = replace(info, index=info.index - info.turns)
        return clients["w"] + x / self._rate_sum(x, before)

    def _rate_sum(self, x: Tensor, info: RoundInfo) -> Tensor:
        """K eta [1, 1] of a round."""
        return self.rates(torch.tensor([info.local_steps]), info).to(x).sum(dim=1, keepdim=True)

    def _same_rate_sum(self, rows: Rows, info: RoundInfo) -> Tensor:
        """K eta [1, 1] of this round. Raises UserError for a client that is not tracked or used other rates."""
        expected = self._rate_sum(rows.rate_sum, info)
        if not torch.allclose(rows.rate_sum, expected, rtol=1e-4, atol=0) or not rows.tracked.all():
            raise UserError(
                f"algorithm.form: found one_vector with clients of K eta {rows.rate_sum.flatten().tolist()}, expected "
                f"{float(expected):g} from every client, all of them tracked; set algorithm.form=tracked"
            )
        return expected


def _require_everyone(reduced: Reduced, info: RoundInfo) -> None:
    """Raises RunError if an upload is missing: y is the change of x only with all N clients in it."""
    if reduced.clients < info.num_clients:
        raise RunError(
            f"round {info.index + 1}: algorithm.form=one_vector needs the upload of every client, found "
            f"{reduced.clients} of {info.num_clients}; set algorithm.form=tracked"
        )
