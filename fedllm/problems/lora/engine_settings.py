"""How gradients are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EngineSettings:
    """How gradients are computed; but for rounding, it changes none of them.

    autocast: dtype of the matrix products, None for the model's own. slices: how many padded, length-sorted slices each
    batch is cut into; None: rows of several samples, or where the model does not take these, the cut that costs least.
    pass_bytes: what a pass of several clients may save for its backward, or an evaluation batch would. least_tokens:
    tokens that it may have in any case, if they save at most 4 * pass_bytes. checkpointing: a pass saves the inputs of
    the model's blocks only, and computes the blocks again in the backward pass. pad_id: the id of the padding token.
    """

    autocast: torch.dtype | None = None
    slices: int | None = None
    pass_bytes: float = math.inf
    least_tokens: int = 0
    checkpointing: bool = False
    pad_id: int = 0
