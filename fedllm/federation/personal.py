"""Coordinates that each client keeps to itself: it trains them on from its own values, and sends nothing of them.

Of these coordinates a client sends zeros, so that the server's x stays at x0 there. Its tracked vectors stay as they
were before the round, see Algorithm.personal_fault. The client's values are kept under the name PERSONAL.
"""

from __future__ import annotations

from torch import Tensor

from fedllm.algorithms.base import Algorithm
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.federation.setup import PERSONAL


def require_personal(algorithm: Algorithm, name: str) -> None:
    """Raises UserError if clients under this algorithm cannot keep coordinates to themselves. name: the algorithm's."""
    if why := algorithm.personal_fault():
        raise UserError(
            f"deployment.keep_local: found head, but {name} cannot leave coordinates out: {why}; leave keep_local out, "
            "or choose another algorithm"
        )


def own_rows(x: Tensor, places: Tensor, own: Tensor) -> Tensor:
    """Rows x [C, d] with the clients' own values [C, p] at the personal coordinates; x does not change."""
    return x.index_copy(1, places, own.to(x))


def withhold(
    algorithm: Algorithm, places: Tensor, local: State, x: Tensor, sent: State, kept: State, before: State
) -> tuple[State, State]:
    """What clients send and keep where `places` are personal: see `Algorithm.end` for sent and kept {name: [C, ...]}.

    local["x"] [C, d] is set to the server's x [d] at these coordinates, so that no measure of an update has them.
    """
    own = local["x"][:, places]
    hidden = ("d", *algorithm.tracked_uploads())
    sent = {name: value.index_fill(1, places, 0) if name in hidden else value for name, value in sent.items()}
    kept = kept | algorithm.keep(kept, before, sent) | {PERSONAL: own}
    local["x"][:, places] = x[places]
    return sent, kept
