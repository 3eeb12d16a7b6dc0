"""Random numbers as a function of (seed, purpose, keys) alone: not of global state, rank, time or iteration order."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed for one purpose, for example derive(0, "batches", round, client)."""
    text = "/".join([str(int(seed)), purpose, *(str(int(key)) for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """An independent numpy generator for one purpose."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose, *keys)))


def torch_rng(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """An independent CPU torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, purpose, *keys))
