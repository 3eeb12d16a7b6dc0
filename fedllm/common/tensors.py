"""Named tensors: their type, their checks and the form in which they are stored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from fedllm.common.errors import UserError

State = dict[str, Tensor]


def under(prefix: str, tensors: State) -> State:
    """The tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def plain(tensors: State) -> State:
    """The tensors as safetensors needs them: contiguous, on the CPU, none sharing memory with another."""
    found = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if len({value.untyped_storage().data_ptr() for value in found.values()}) < len(found):
        found = {name: value.clone() for name, value in found.items()}
    return found


def require_vector(what: str, x: Any, dim: int) -> None:
    """Raises UserError unless x is a floating-point tensor [dim]."""
    if isinstance(x, Tensor) and x.shape == (dim,) and x.is_floating_point():
        return
    raise UserError(f"{what}: found {shown(x)}, expected [{dim}] of floating-point numbers")


def shown(value: Any) -> str:
    """A tensor's shape and dtype, or the type of another value."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def shortest(value: float) -> float | None:
    """A float32 as the shortest number that is rounded to it: 0.1 and not 0.10000000149; None if it is not finite."""
    return float(str(np.float32(value))) if math.isfinite(value) else None
