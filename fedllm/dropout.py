"""Dropout masks as a pure function of who and where, not of a random stream.

A mask's bit is a hash of (seed, round, client, step, layer, sample slot, token position, feature): padding, slicing and
cohort size cannot change it. Rates are rounded to 1/65536.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.random import derive

# 32-bit multipliers with good avalanche (Ellis' lowbias32), as int32.
_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def _wrap(number: int) -> int:
    """A whole number modulo 2^32, as a signed 32-bit one."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix(h: Tensor) -> Tensor:
    """A bijective scramble of int32, in place on `h`, which must be fresh."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= _M1
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= _M2
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def row_keys(seed: int, round: int, step: int, clients: Sequence[int], slots: Tensor) -> Tensor:
    """Keys [R] (int32) of a micro-batch's rows, client by client; slots [C, n]: places in the client's own batch."""
    keys = [derive(seed, "dropout", round, client, step) & 0x7FFFFFFF for client in clients]
    return _mix(torch.tensor(keys, dtype=torch.int32)[:, None] + slots.to(torch.int32) * 0x3504F333).reshape(-1)


def dropout(x: Tensor, rate: float, layer: int, keys: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [R, F] or [R, L, F] with each value zeroed at `rate` and the rest scaled up.

    keys [R] from row_keys; of packed rows keys [R, L], those of each token's sample, and its position [R, L] there.
    """
    threshold = round(rate * 65536)
    if threshold == 0:
        return x
    features = x.shape[-1]
    h = _mix(keys + _wrap(layer * 0x2545F491))
    if x.dim() == 3:
        if positions is None:
            h, positions = h[:, None], torch.arange(x.shape[1], device=x.device)
        h = _mix(h + positions.to(torch.int32) * 0x1B873593)
    # One hash serves two features, 16 bits each.
    pairs = _mix(torch.arange((features + 1) // 2, dtype=torch.int32, device=x.device))
    h = h[..., None] ^ pairs
    h *= _M1
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= _M2
    kept = h.view(torch.int16)[..., :features] >= threshold - 32768
    return x * (kept * (65536 / (65536 - threshold))).to(x.dtype)
