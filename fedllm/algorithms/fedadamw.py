"""FedAdamW: AdamW whose v starts from averaged block means and whose step follows the global direction."""

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
    require_fraction,
    rows_of,
    update_moments,
)
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from torch import Tensor

    from fedllm.common.tensors import State


@dataclass(frozen=True, kw_only=True)
class FedAdamW(Algorithm):
    """Server keeps vbar and Delta, 0 at the start. m = 0 and v = expand(vbar) at the start of a round.
    For k = 1..K, with t' = t K + k:
        m = b1 m + (1-b1) g
        v = b2 v + (1-b2) g^2
        mh = m/(1-b1^k),  vh = v/(1-b2^t')
        x_i -= eta (mh/(sqrt(vh)+eps) + alpha Delta + lambda x_i)
    Clients send d_i and vbar_i, the block means of v (raw, uncorrected). Server:
        x += eta_g D
        vbar = mean_i vbar_i
        Delta = -D/(K eta)

    A client that saw the round before can work out Delta from the two x, so it need not be sent to it.

    *choice*: the weights decay. FW eq. 5 and Alg. 2 print "- lambda x" inside the step, by which they would grow; FW's
    code decays, as AdamW does. *choice*: the second moment, which is carried over, is corrected by the step of the
    whole run, t' (Alg. 2, line 12), and the first, which starts anew, by k; `bias_time: global` uses t' for both, as
    the authors' code does. *choice*: K in t' is the most steps that a client takes, so that t' is the same for all
    clients. *choice*: K eta is the mean of the clients' sums of rates, where they take unequal steps. *choice*: the
    blocks are the partition of App. D, Alg. 3; D.2 has one block a module and D.3, for the paper's RoBERTa, one a
    tensor (`blocks: tensor`).

    `form: alg3` has b1 = 0, no decay, and x_i -= eta (alpha g/(sqrt(vh)+eps) + (1-alpha) Delta); its gamma is eta_g K
    eta. Ablations of Table 4: `aggregate_v: false` (v = 0 at the start of each round, corrected by k), `alpha: 0` (no
    Delta), `decay: coupled` (lambda x_i is added to g).
    """

    aliases: ClassVar = ("fedit_fedadamw",)
    paper: ClassVar = (
        "FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization Guarantees "
        "for Federated Large Models, Alg. 2 and Alg. 3"
    )
    derivable: ClassVar = ("Delta",)
    moment: ClassVar = "v"
    nonnegative: ClassVar = ("vbar",)

    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the two moments", symbol="b1, b2")
    eps: float = setting(1e-8, "added to the root", symbol="eps")
    alpha: float = setting(0.5, "weight of the global direction Delta", symbol="alpha")
    weight_decay: float = setting(0.01, "weight decay", symbol="lambda")
    blocks: Literal["hessian", "tensor", "elementwise"] = setting(
        "hessian", "coordinates that share one number of vbar"
    )
    form: Literal["alg2", "alg3"] = setting("alg2", "the practical Alg. 2, or Alg. 3 of the analysis")
    bias_time: Literal["local", "global"] = setting("local", "step count in the first moment's bias correction")
    decay: Literal["decoupled", "coupled"] = setting("decoupled", "decay the weights, or add lambda x to the gradient")
    aggregate_v: bool = setting(True, "start v from the server's block means vbar, or from 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "alpha")

    def server_vectors(self) -> Vectors:
        return {"Delta": "d", "vbar": "B"} if self.aggregate_v else {"Delta": "d"}

    def uploads(self) -> Vectors:
        return {"d": "d", "vbar": "B"} if self.aggregate_v else {"d": "d"}

    def personal_fault(self) -> str:
        return "" if self.form == "alg2" else super().personal_fault()  # alpha Delta is added, and 0 there

    def begin(self, x: Tensor, server: State, clients: State, info: RoundInfo) -> State:
        v = info.blocks.expand(server["vbar"]) if self.aggregate_v else None
        return {"x": x.clone(), "m": rows_of(None, x), "v": rows_of(v, x), "Delta": server["Delta"].expand_as(x)}

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        alg2 = self.form == "alg2"
        b1, b2 = self.betas if alg2 else (0.0, self.betas[1])
        decay = self.weight_decay if alg2 else 0.0
        if self.decay == "coupled":
            g, decay = g + decay * local["x"], 0.0
        t = info.earlier * info.local_steps + k
        update_moments(local, g, (b1, b2))
        mh = local["m"] / (1 - b1 ** (t if self.bias_time == "global" else k))
        vh = local["v"] / (1 - b2 ** (t if self.aggregate_v else k))
        direction, Delta = adam_direction(mh, vh, self.eps), local["Delta"]
        direction = direction + self.alpha * Delta if alg2 else self.alpha * direction + (1 - self.alpha) * Delta
        descend(local["x"], eta, direction, decay)

    def end(
        self, local: State, x: Tensor, server: State, clients: State, rows: Rows, info: RoundInfo
    ) -> tuple[State, State]:
        vbar = {"vbar": info.blocks.means(local["v"])} if self.aggregate_v else {}
        return {"d": local["x"] - x, **vbar}, {}

    def aggregate(self, x: Tensor, server: State, reduced: Reduced, info: RoundInfo) -> tuple[Tensor, State]:
        Delta = -reduced.mean["d"] / reduced.rate_sum
        vbar = {"vbar": reduced.mean["vbar"]} if self.aggregate_v else {}
        return x + self.server_lr * reduced.mean["d"], {"Delta": Delta, **vbar}
