"""Nothing from a client counts before it is checked: names, shapes, dtypes, finite values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedllm.algorithms.base import State


def faults(upload: State, lengths: Mapping[str, int], dtype: torch.dtype, rows: int) -> dict[int, str]:
    """Row -> why it must be rejected, for an upload {name: [C, length]} of `rows` clients; empty where all is well.

    lengths: the names expected, each with its number of values. A wrong name, shape or dtype rejects every row, since
    it cannot be told whose values are whose; a value that is not finite rejects its own row only.
    """
    if set(upload) != set(lengths):
        reason = f"found tensors {sorted(upload)}, expected {sorted(lengths)}"
        return dict.fromkeys(range(rows), reason)
    for name, length in lengths.items():
        tensor = upload[name]
        if tuple(tensor.shape) != (rows, length) or tensor.dtype != dtype:
            reason = f"tensor '{name}': found {list(tensor.shape)} {tensor.dtype}, expected [{rows}, {length}] {dtype}"
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
