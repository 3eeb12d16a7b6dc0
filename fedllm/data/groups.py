"""Groups of samples: those with one value of a column. Clients are made of them, and they stand in for labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedllm.common.errors import UserError, cut_name
from fedllm.common.schema import nearest
from fedllm.data.split import Split


def value_name(value: Any) -> str:
    """The name of a column's value. 1, 1.0 and "1" are one value, because files differ in how they write it."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def in_order(names: Sequence[str]) -> list[str]:
    """The names once each, whole numbers first."""
    return sorted(set(names), key=_numbers_first)


def _numbers_first(name: str) -> tuple[bool, int, str]:
    whole = name.removeprefix("-").isdecimal()
    return not whole, int(name) if whole else 0, name


def column_values(split: Split, column: str | None, dataset: str) -> list[Any]:
    """The values of `partition.column` of the training split. dataset: its name in errors.

    Raises UserError if there is no such column, or a sample has no value; it names the sample by its row in the file.
    """
    if column is None or column not in split.columns:
        raise UserError(
            f"partition.column={column}: the training split of '{dataset}' has no such column"
            f"{nearest(str(column), list(split.columns))}; its columns, besides those of text and label: "
            f"{', '.join(map(cut_name, split.columns)) or 'none'}"
        )
    values = split.columns[column]
    missing = [sample for sample, value in enumerate(values) if value is None or value != value]
    if missing:
        first = "" if split.rows is None else f", the first is row {split.rows[missing[0]]} of {dataset}"
        raise UserError(
            f"partition.column={column}: {len(missing):,} of {len(values):,} training samples have no value"
            f"{first}; every sample must belong to a client: fill them in or drop these rows"
        )
    return values


def group_ids(values: Sequence[Any], names: Sequence[str]) -> np.ndarray:
    """The place in `names` of each value's name, int64 [n]; -1 for one that is not there."""
    places = {name: place for place, name in enumerate(names)}
    return np.array([places.get(value_name(value), -1) for value in values], np.int64)
