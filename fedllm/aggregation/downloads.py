"""What the server sends a client: x and the algorithm's downloads, in the format of `downloads.bits`.

A client starts from the x that it reads, and d is the difference from that x. So rounding adds no error to d, and the
server's own x is never rounded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedllm.aggregation.settings import DownloadsSettings
from fedllm.common.tensors import State


def encode(vectors: State, names: Iterable[str], settings: DownloadsSettings) -> State:
    """The vectors as they travel: those of `names` rounded to the nearest bfloat16 where the settings say so."""
    if settings.bits == "float32":
        return vectors
    rounded = {*names}
    return {name: value.to(torch.bfloat16) if name in rounded else value for name, value in vectors.items()}


def as_read(vectors: State, names: Iterable[str], settings: DownloadsSettings) -> State:
    """The vectors as a client reads them, in their own dtype."""
    if settings.bits == "float32":
        return vectors
    return {name: found.to(vectors[name]) for name, found in encode(vectors, names, settings).items()}


def travel_dtype(dtype: torch.dtype, settings: DownloadsSettings) -> torch.dtype:
    """The dtype in which x and the algorithm's downloads travel. dtype: that of x."""
    return dtype if settings.bits == "float32" else torch.bfloat16
