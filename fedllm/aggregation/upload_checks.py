"""Checks what comes from a client before it is used: names, shapes, dtypes, finite values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def misfit(found: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> str | None:
    """What is wrong with `found`; None if it maps exactly these names to dense tensors of these shapes and dtype."""
    if not isinstance(found, Mapping):
        return f"found {type(found).__name__}, expected tensors {sorted(shapes)}"
    if set(found) != set(shapes):
        return f"found tensors {sorted(map(str, found))}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        value = found[name]
        if not isinstance(value, Tensor):
            is_found = type(value).__name__
        elif value.layout != torch.strided or value.is_meta:
            is_found = f"a {'meta' if value.is_meta else value.layout} tensor"
        else:
            is_found = f"{list(value.shape)} {value.dtype}"
            if tuple(value.shape) == shape and value.dtype == dtype:
                continue
        return f"tensor '{name}': found {is_found}, expected {list(shape)} {dtype}"
    return None


def faults(upload: Any, lengths: Mapping[str, int], dtype: torch.dtype, rows: int) -> dict[int, str]:
    """The rows of an upload {name: [C, length]} of `rows` clients that must be rejected, each with the reason.

    lengths: the expected names with their numbers of values. A wrong name, shape or dtype rejects every row, because it
    is unclear which values belong to which client. A value that is not finite rejects its row only.
    """
    if reason := misfit(upload, {name: (rows, length) for name, length in lengths.items()}, dtype):
        return dict.fromkeys(range(rows), reason)
    found: dict[int, str] = {}
    if not upload:
        return found
    finite = {name: torch.isfinite(tensor).all(dim=1) for name, tensor in upload.items()}
    healthy = torch.stack(list(finite.values())).all(dim=0).tolist()
    for row in (row for row in range(rows) if not healthy[row]):
        name = next(name for name in upload if not finite[name][row])
        count = int((~torch.isfinite(upload[name][row])).sum())
        found[row] = f"tensor '{name}': {count:,} of {lengths[name]:,} values are not finite"
    return found


def fault(vectors: Any, lengths: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """What is wrong with one client's vectors {name: [length]}, or None; see `faults`."""
    if reason := misfit(vectors, {name: (length,) for name, length in lengths.items()}, dtype):
        return reason
    return faults({name: value[None] for name, value in vectors.items()}, lengths, dtype, 1).get(0)
