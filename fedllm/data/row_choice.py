"""How a user's table is read by the `data:` section: its form, the rows that count, and the names of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import UserError, cut_name, listed
from fedllm.data.arrow_files import CsvForm
from fedllm.data.tables import Table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings


def csv_form(settings: DataSettings) -> CsvForm:
    """How the data set's CSV files are written."""
    return CsvForm(settings.encoding, settings.delimiter)


def prepared(settings: DataSettings, table: Table, columns: Sequence[str], label: str) -> Table:
    """The table without rows that lack a value in one of these columns, if `drop_missing` says so, and with the label
    names of `label_map`. The notes say how many rows went.

    Raises UserError where no row is left."""
    if settings.drop_missing:
        table = _without_missing(table, [name for name in (*columns, label) if name in table.columns])
    if settings.label_map is not None and label in table.columns:
        table = _renamed(table, label, settings.label_map)
    return table


def _without_missing(table: Table, columns: Sequence[str]) -> Table:
    """Rows without a value, or with blanks alone, in one of the columns are left out."""
    lacking = {name: sum(map(_is_missing, table.columns[name])) for name in columns}
    if not any(lacking.values()):
        return table
    kept = [row for row in range(len(table)) if not any(_is_missing(table.columns[name][row]) for name in columns)]
    told = ", ".join(f"{count:,} without '{name}'" for name, count in lacking.items() if count)
    if not kept:
        raise UserError(f"{table.source}: data.drop_missing leaves no row: {told} of {len(table):,} rows")
    note = f"{table.source}: left out {len(table) - len(kept):,} of {len(table):,} rows ({told}); errors count the rest"
    return replace(table.take(kept), notes=(*table.notes, note))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _renamed(table: Table, label: str, names: dict[str, str]) -> Table:
    """The table with these labels under their new names. A note tells of names that no row has."""
    values: list[Any] = table.columns[label]
    if declared := table.classes.get(label):
        values = [declared[v] if type(v) is int and 0 <= v < len(declared) else v for v in values]
    written = [None if value is None else class_name(value) for value in values]
    found = [None if name is None else names.get(name, name) for name in written]
    notes = [*table.notes]
    if unused := sorted(names.keys() - set(written)):
        notes.append(
            f"data.label_map: {table.source}, column '{label}': no row has {listed(unused, 20)}; its labels: "
            f"{listed(sorted({cut_name(name) for name in written if name is not None}), 20)}"
        )
    classes = {column: own for column, own in table.classes.items() if column != label}
    return replace(table, columns=table.columns | {label: found}, classes=classes, notes=tuple(notes))


def class_name(value: Any) -> str:
    """The class name of a label. 1, 1.0 and "1" are one class, because the splits may differ in file format."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
