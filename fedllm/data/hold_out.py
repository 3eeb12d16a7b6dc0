"""Random parts of a split: the samples that are held out, and a subset."""

from __future__ import annotations

import numpy as np

from fedllm.common.errors import UserError
from fedllm.common.seeding import numpy_rng
from fedllm.data.repeats import first_with_same_text
from fedllm.data.split import Split


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split, list[str]]:
    """Splits off a random `fraction` of the samples; returns the remaining rows, the held-out rows and notes.

    Rows with the same text, prompt or image, which may have different labels, are on the same side; they count as the
    first one. Per class or group, at least one remains, and at least one is held out if there are two or more.
    """
    first = first_with_same_text(split.contents)
    distinct = first == np.arange(len(split))
    strata = split.labels if split.labels.dtype == np.int64 else np.zeros(len(split), np.int64)
    held = np.zeros(len(split), bool)
    for stratum in np.unique(strata):
        rows = np.flatnonzero((strata == stratum) & distinct)
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held[numpy_rng(seed, "holdout", int(stratum)).permutation(rows)[:count]] = True
    if not held.any():
        group = "class" if split.conversations is None else "value of partition.column"
        raise UserError(
            f"data.holdout={fraction}: found {len(split)} rows with one {split.kind} per {group}, too few to hold any "
            f"out; give data.validation"
        )
    held, repeats = held[first], int((~distinct).sum())
    kind = split.kind
    note = f"{repeats:,} of {len(split):,} rows repeat the {kind} of another row; the hold-out keeps equal {kind}s "
    note += "together"
    return split.take(np.flatnonzero(~held)), split.take(np.flatnonzero(held)), [note] if repeats else []


def subset(split: Split, limit: int | None, seed: int, role: str) -> Split:
    """A uniform random subset of `limit` samples in their order; all of them where there are no more, or for None."""
    if limit is None or limit >= len(split):
        return split
    return split.take(np.sort(numpy_rng(seed, f"subset/{role}").choice(len(split), limit, replace=False)))
