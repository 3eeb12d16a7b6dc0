"""A 32-bit hash of tensors, for random draws that are a pure function of their counters."""

from __future__ import annotations

from torch import Tensor

# 32-bit multipliers with good avalanche (Ellis' lowbias32), as int32.
M1, M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def mix(h: Tensor) -> Tensor:
    """A bijective scramble of int32, in place on `h`, which must be fresh."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= M1
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= M2
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h
