"""Reads tables and folders of text files as plain columns. Nothing in a file is executed, and nothing is cached.

No error shows a value of a text column: it may be a patient's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedllm.common.errors import UserError, listed
from fedllm.common.schema import nearest
from fedllm.data.arrow_files import PLAIN_CSV, Columns, CsvForm, declared_classes, read_csv, read_parquet
from fedllm.data.repeats import comparable


@dataclass(frozen=True)
class Table:
    """Named columns of equal length. Errors count rows from 1, without the header line.

    source: the table's name in errors. classes: integer column -> class names, if the file declares them.
    notes: messages to the user about changes made while reading. origins: of a table joined from several files, their
    names and numbers of rows.
    """

    source: str
    columns: Columns
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origins: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def row_name(self, row: int) -> str:
        """How errors name a row, from 1: "row 7", or "row 7 of a.csv" where the table was joined from several files."""
        for name, rows in self.origins:
            if row <= rows:
                return f"row {row} of {name}"
            row -= rows
        return f"row {row}"

    def _cell(self, row: int, column: str) -> str:
        return f"{self.source}, {self.row_name(row)}, column '{column}'"

    def take(self, rows: Sequence[int]) -> Table:
        """The table of these rows, from 0, in rising order."""
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        owners = np.repeat(np.arange(len(self.origins)), [count for _, count in self.origins])
        counts = np.bincount(owners[list(rows)], minlength=len(self.origins)) if self.origins else ()
        origins = tuple((name, int(count)) for (name, _), count in zip(self.origins, counts, strict=True))
        return replace(self, columns=columns, origins=origins)

    def column(self, name: str, key: str) -> list[Any]:
        """The values of a column, none of them missing. key: the recipe key that names the column.

        Raises UserError if the table lacks the column or a value is missing.
        """
        if name not in self.columns:
            raise UserError(
                f"{key}: {self.source} has no column '{name}'{nearest(name, list(self.columns))}; "
                f"its columns: {listed(list(self.columns), 20)}"
            )
        values = self.columns[name]
        if missing := values.count(None):
            first, verb = self.row_name(values.index(None) + 1), "has" if missing == 1 else "have"
            raise UserError(
                f"{self.source}, column '{name}': {missing:,} of {len(values):,} rows {verb} no value, the first is "
                f"{first}; fill them in or drop these rows"
            )
        return values

    def without(self, *names: str) -> Columns:
        """All columns except `names`."""
        return {name: values for name, values in self.columns.items() if name not in names}

    def texts(self, name: str, key: str = "data.text") -> list[str]:
        """A column of text. Raises UserError that names the first row whose value is missing or not text. key: the
        recipe key or option that names the column."""
        values = self.column(name, key)
        for row, value in enumerate(values, 1):
            if type(value) is not str:
                raise UserError(
                    f"{self._cell(row, name)}: found a value of type {type(value).__name__}, expected text; {key} "
                    f"names the columns to read"
                )
            if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
                raise UserError(f"{self._cell(row, name)}: found half of a surrogate pair, expected readable text")
        return values


def read_table(path: Path, text: Sequence[str] = (), label: str = "", form: CsvForm = PLAIN_CSV) -> Table:
    """Reads a .csv, .tsv, .json, .jsonl or .parquet file, or a folder with one folder of .txt files per class.

    CSV: written as `form` says, with a header line. An unquoted empty cell is a missing value, and so is NA in a column
    of numbers. A column of numbers is read as text in three cases: `text` names it; a cell has a leading zero (007), as
    ids have; or it has fractions and is not the `label`, because 1.1 and 1.10 may be two ids.
    JSON: one object per line, or one list of objects.
    Raises UserError for an unknown kind of file, a file that does not parse, or a file without rows.
    """
    if path.is_dir():
        return _read_class_folders(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: cannot read '{path.suffix}' files; expected one of {', '.join(READERS)}")
    if not path.stat().st_size:
        raise UserError(f"{path}: the file is empty")
    try:
        columns, classes = reader(path, text, label, form), declared_classes(path)
    except UnicodeDecodeError as error:
        is_csv = path.suffix.lower() in (".csv", ".tsv")
        encoding, remedy = (form.encoding, "set data.encoding, or ") if is_csv else ("utf-8", "")
        raise UserError(f"{path}: not {encoding} text (byte {error.start}); {remedy}save it as UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: its values nest too deeply") from error
    except (ValueError, OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: {error}") from error
    table = Table(str(path), columns, classes)
    if not len(table):
        raise UserError(f"{path}: the file holds no rows")
    return table


def _read_json(path: Path, *_: object) -> Columns:
    content = path.read_text(encoding="utf-8-sig")
    if content.lstrip().startswith("["):
        records = json.loads(content)
    else:
        records = []
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"line {number}, column {error.colno}: {error.msg}; expected one object per line, or one list"
                    ) from error
    for row, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(
                f"row {row} is of type {type(record).__name__}, expected an object of column names and values"
            )
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


READERS: dict[str, Callable[[Path, Sequence[str], str, CsvForm], Columns]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": read_parquet,
}


def _read_class_folders(folder: Path) -> Table:
    """Reads `folder/<class>/*.txt` as the columns text, label and file. A file that is not UTF-8 is read as Latin-1.

    A text that equals an earlier one, apart from blanks at both ends, is dropped. Otherwise it could be in both splits.
    """
    file_of: dict[str, Path] = {}
    files = sorted(folder.glob("*/*.txt"))
    for file in files:
        content = file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")
        file_of.setdefault(comparable(text), file)
    if not file_of:
        raise UserError(f"{folder}: expected one folder per class with .txt files in it, found none")
    columns: Columns = {
        "text": list(file_of),
        "label": [file.parent.name for file in file_of.values()],
        "file": [file.relative_to(folder).as_posix() for file in file_of.values()],
    }
    dropped = len(files) - len(file_of)
    notes = (f"{folder.name}: dropped {dropped} of {len(files)} files whose text repeats another's",) if dropped else ()
    return Table(str(folder), columns, notes=notes)
