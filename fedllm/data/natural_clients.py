"""Natural clients: one per value of a column, with limits on their samples, and what these limits leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedllm.common.errors import UserError, cut_name
from fedllm.common.seeding import numpy_rng
from fedllm.data.groups import in_order, value_name

_NAMED = 5  # the most clients that a message names


def natural_clients(
    column: Sequence[Any] | None,
    n: int,
    clients: int | None,
    *,
    min_size: int = 1,
    max_size: int | None = None,
    drop_small: bool = False,
    seed: int = 0,
) -> list[np.ndarray]:
    """The samples of each value of `column` [n]: sorted int64 indices. The values are sorted, whole numbers first.

    drop_small: values with fewer than min_size samples are no clients; without it they are an error. max_size: the most
    samples of a client, drawn at random by (seed, place of its value among all). clients: their number after that, if
    it is known. Raises UserError that names the key.
    """
    if max_size is not None and max_size < min_size:
        raise UserError(f"partition.max_size={max_size}: expected at least min_size={min_size}")
    holders = _holders(column, n)
    small = {name: len(samples) for name, samples in holders.items() if len(samples) < min_size}
    if small and not drop_small:
        raise UserError(
            f"partition.min_size={min_size}: fewer samples for {_named(small)}; lower it, or leave them out with "
            "partition.drop_small=true"
        )
    if len(small) == len(holders):
        raise UserError(f"partition.min_size={min_size}: every client has fewer samples ({_named(small)}); lower it")
    if clients not in (None, found := len(holders) - len(small)):
        kept = f" with {min_size} samples or more" if small else ""
        raise UserError(
            f"partition.clients={clients}: the column has {found} distinct values{kept}, one client each; "
            f"set partition.clients to null or {found}"
        )
    parts = []
    for place, name in enumerate(in_order(list(holders))):
        samples = np.array(holders[name], np.int64)
        if max_size is not None and len(samples) > max_size:
            samples = np.sort(numpy_rng(seed, "partition/max-size", place).permutation(samples)[:max_size])
        if name not in small:
            parts.append(samples)
    return parts


def left_out(column: Sequence[Any], parts: Sequence[np.ndarray]) -> list[str]:
    """Messages that say which clients and how many samples the limits leave out; [] where they leave out nothing.

    parts: the clients that natural_clients made of `column`.
    """
    holders = _holders(column, len(column))
    kept = {value_name(column[part[0]]): len(part) for part in parts}
    dropped = {name: len(samples) for name, samples in holders.items() if name not in kept}
    cut = {name: len(holders[name]) - size for name, size in kept.items() if size < len(holders[name])}
    found = []
    if dropped:
        found.append(
            f"partition.drop_small leaves out {len(dropped):,} of {len(holders):,} clients, which have "
            f"{sum(dropped.values()):,} samples: {_named(dropped)}"
        )
    if cut:
        found.append(
            f"partition.max_size leaves out {sum(cut.values()):,} of {len(column):,} samples, of {len(cut):,} of "
            f"{len(holders):,} clients: {_named(cut)}"
        )
    return found


def _holders(column: Sequence[Any] | None, n: int) -> dict[str, list[int]]:
    """The samples of each value, in the order of their first samples."""
    if column is None or len(column) != n:
        found = "none" if column is None else f"{len(column)} values"
        raise UserError(f"partition.column: scheme by_column needs a column of {n} values, found {found}")
    holders: dict[str, list[int]] = {}
    for sample, value in enumerate(column):
        if value is None or value != value:
            raise UserError(f"partition.column: row {sample + 1} has no value; every sample must belong to a client")
        holders.setdefault(value_name(value), []).append(sample)
    return holders


def _named(counts: dict[str, int]) -> str:
    """Clients with a number of samples each: "'a' (1), 'b' (2), ..."."""
    text = ", ".join(f"'{cut_name(name)}' ({count:,})" for name, count in [*counts.items()][:_NAMED])
    return text + (", ..." if len(counts) > _NAMED else "")
