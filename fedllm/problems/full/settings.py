"""How the gradients of all weights are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FullSettings:
    """How gradients are computed; but for rounding, it changes none of them, except `local_buffers`.

    autocast: dtype of the matrix products, None for float32. pass_bytes: what a pass may save for its backward, and an
    evaluation batch would. pad_id: the id of the padding token. stacked: clients trained together share a pass, by
    torch.func; otherwise each has its own. local_buffers: see problems.base.Buffers.
    """

    autocast: torch.dtype | None = None
    pass_bytes: float = math.inf
    pad_id: int = 0
    stacked: bool = False
    local_buffers: bool = False
