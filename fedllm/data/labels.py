"""Converts the labels of a table to class ids or regression targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedllm.common.errors import UserError, cut_name, listed
from fedllm.data.row_choice import class_name
from fedllm.data.tables import Table

KEY = "data.label"
FEW_FRACTIONS, FEW_CLASSES = 0.1, 20  # a regression with at most these looks like classes
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Coding:
    """How the values of a label column map to class ids or regression targets.

    names: class names in the order of their ids; () for a regression.
    declared: whether the values are class ids that the data set declares. If not, they are class names.
    given: whether data.classes gives the names; see encode_as.
    doubts: warnings about how the values were understood.
    """

    names: tuple[str, ...]
    declared: bool = False
    doubts: tuple[str, ...] = ()
    given: bool = False

    def encode(self, table: Table, label: str) -> np.ndarray:
        """A column as int64 ids or float32 targets [n]. Raises UserError that names the first invalid row."""
        if self.given:
            return encode_as(table, label, self.names, knows="data.classes")[0]
        values = table.column(label, KEY)
        if not self.names:
            codes = [float(v) if type(v) in (int, float) and abs(v) <= _LARGEST else None for v in values]
            expected = f"a finite number of at most {_LARGEST:.3g}, which is float32's largest"
        elif self.declared:
            codes = [v if type(v) is int and 0 <= v < len(self.names) else None for v in values]
            expected = f"a class from 0 to {len(self.names) - 1} (data sets mark unlabelled rows by -1)"
        else:
            ids = {name: index for index, name in enumerate(self.names)}
            codes = [ids.get(class_name(v)) for v in values]
            names = ", ".join(map(cut_name, self.names[:20])) + (", ..." if len(self.names) > 20 else "")
            expected = f"a class of the training split: {names}"
        if None in codes:
            row = codes.index(None)
            found = cut_name(repr(values[row]))
            raise UserError(
                f"{table.source}, {table.row_name(row + 1)}, column '{label}': found {found}, expected {expected}"
            )
        return np.array(codes, np.int64 if self.names else np.float32)


def learn_coding(table: Table, label: str, regression: bool | None = None) -> Coding:
    """The coding of a label column that declares no classes.

    Unless the task is a regression, the classes are the sorted distinct values. regression: whether it is one; None
    means yes if the values are numbers and not all whole. Raises UserError for values of mixed or other types, a
    regression without numbers, a single class, or a column with nearly as many distinct values as rows.
    """
    values = table.column(label, KEY)
    where = f"{table.source}, column '{label}'"
    kinds = {type(value) for value in values}
    numeric = kinds <= {int, float}
    if not numeric and kinds not in ({str}, {bool}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"{where}: found values of type {found}; expected text, whole numbers or numbers")
    if regression and not numeric:
        raise UserError(f"{where}: found {cut_name(repr(values[0]))}, expected numbers, as data.regression=true says")
    fractions = [row for row, value in enumerate(values, 1) if not _is_whole(value)] if numeric else []
    if regression or (regression is None and fractions):
        return Coding((), doubts=() if regression else _few_fractions(where, values, fractions))
    names = tuple(map(class_name, sorted(set(values))))
    for row, name in enumerate(map(class_name, values), 1):
        if not name.strip() or name.encode("utf-8", "replace").decode() != name:
            raise UserError(
                f"{where}, {table.row_name(row)}: found {cut_name(repr(name))}, expected a class's name in readable "
                "text"
            )
    if len(names) < 2:
        raise UserError(f"{where}: every row has the label '{cut_name(names[0])}'; expected two classes or more")
    if len(values) >= 100 and len(names) > len(values) / 2:
        raise UserError(f"{where}: {len(names)} classes in {len(values)} rows; {KEY} must name a column of classes")
    return Coding(names)


def encode_as(
    table: Table, label: str, names: Sequence[str], key: str = KEY, knows: str = "the model"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels of a table for a model whose classes are known already: int64 ids, or float32 targets, [n]; and notes.

    names: the model's classes in the order of their ids; () for a regression. A label is the name of a class. An id
    whose class the file declares stands for that name. Whole numbers from 0 stand for the model's ids if none of them
    is a name. key: the option that names the column. knows: who knows the classes, for errors.
    Raises UserError with the number of rows whose label is not known.
    """
    values = table.column(label, key)
    if not names:
        return Coding(()).encode(table, label), ()
    if declared := table.classes.get(label):
        values = [declared[v] if type(v) is int and 0 <= v < len(declared) else v for v in values]
    ids = {name: index for index, name in enumerate(names)}
    codes = [ids.get(class_name(value)) for value in values]
    if all(code is None for code in codes) and all(type(v) is int and 0 <= v < len(names) for v in values):
        note = f"{table.source}, column '{label}': its numbers are taken for ids, 0 = '{cut_name(names[0])}'"
        return np.array(values, np.int64), (note,)
    if unknown := [row for row, code in enumerate(codes) if code is None]:
        first = unknown[0]
        raise UserError(
            f"{table.source}, column '{label}': {len(unknown):,} of {len(values):,} rows have a label that {knows} "
            f"does not know, the first is {cut_name(repr(values[first]))} in {table.row_name(first + 1)}; it knows "
            f"{listed(names, 20)}"
        )
    return np.array(codes, np.int64), ()


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _few_fractions(where: str, values: list[Any], fractions: list[int]) -> tuple[str, ...]:
    """A warning if a few fractions made a regression of a column that else looks like classes.

    fractions: the rows, from 1, with a value that is not whole.
    """
    share, whole = len(fractions) / len(values), {value for value in values if _is_whole(value)}
    if share > FEW_FRACTIONS or len(whole) > FEW_CLASSES:
        return ()
    row = fractions[0]
    return (
        f"{where}: {len(fractions):,} of {len(values):,} labels are not whole numbers, the first is {values[row - 1]} "
        f"in row {row}, so this is a regression; for classes, correct them or set data.regression=false",
    )
