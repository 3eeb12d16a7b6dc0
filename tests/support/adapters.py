"""The adapters that runs leave, read back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of the adapter in a run folder."""
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same_bits(a: Path, b: Path) -> bool:
    """Whether two run folders hold the same adapter."""
    first, second = adapter(a), adapter(b)
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def assert_close(a: Path, b: Path) -> None:
    """That their adapters differ by rounding only."""
    first, second = adapter(a), adapter(b)
    assert set(first) == set(second)
    for name, value in second.items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-4 * float(value.abs().max()))
