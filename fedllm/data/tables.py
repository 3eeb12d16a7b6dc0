"""Reads tables and folders of text files as plain columns. Nothing in a file is executed, and nothing is cached.

pyarrow reads CSV: its errors name the row, and it distinguishes an empty cell from a quoted empty text. pandas does
neither, and it pads short rows without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest

Columns = dict[str, list[Any]]
_MISSING = {"NA", "N/A", "NULL", "null"}  # texts that mean a missing number


@dataclass(frozen=True)
class Table:
    """Named columns of equal length. Errors count rows from 1, without the header line.

    source: the table's name in errors. classes: integer column -> class names, if the file declares them.
    notes: messages to the user about changes made while reading.
    """

    source: str
    columns: Columns
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def column(self, name: str, key: str) -> list[Any]:
        """The values of a column, none of them missing. key: the recipe key that names the column.

        Raises UserError if the table lacks the column or a value is missing.
        """
        if name not in self.columns:
            raise UserError(
                f"{key}: {self.source} has no column '{name}'{nearest(name, list(self.columns))}; "
                f"its columns: {', '.join(self.columns)}"
            )
        values = self.columns[name]
        if None in values:
            raise UserError(
                f"{self.source}, row {values.index(None) + 1}, column '{name}': the value is missing; "
                f"fill it in or drop the row"
            )
        return values

    def without(self, *names: str) -> Columns:
        """All columns except `names`."""
        return {name: values for name, values in self.columns.items() if name not in names}

    def texts(self, name: str) -> list[str]:
        """A column of text. Raises UserError that names the first row whose value is missing or not text."""
        values = self.column(name, "data.text")
        for row, value in enumerate(values, 1):
            if type(value) is not str:
                raise UserError(
                    f"{self.source}, row {row}, column '{name}': found {value!r} ({type(value).__name__}), "
                    f"expected text; data.text names the columns to read"
                )
            if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
                raise UserError(f"{self.source}, row {row}, column '{name}': found {value!r}, half of a surrogate pair")
        return values


def read_table(path: Path, text: Sequence[str] = (), label: str = "") -> Table:
    """Reads a .csv, .tsv, .json, .jsonl or .parquet file, or a folder with one folder of .txt files per class.

    CSV: UTF-8 with a header line. An unquoted empty cell is a missing value, and so is NA in a column of numbers. A
    column of numbers is read as text in three cases: `text` names it; a cell has a leading zero (007), as ids have; or
    it has fractions and is not the `label`, because 1.1 and 1.10 may be two ids.
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
        columns, classes = reader(path, text, label), _declared_classes(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: its values nest too deeply") from error
    except (ValueError, OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: {error}") from error
    table = Table(str(path), columns, classes)
    if not len(table):
        raise UserError(f"{path}: the file holds no rows")
    return table


def _columns(table: pa.Table) -> Columns:
    names = table.column_names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"column '{repeated[0]}' is there more than once")
    columns: Columns = table.to_pydict()
    return columns


def _read_csv(path: Path, text: Sequence[str], label: str) -> Columns:
    content = path.read_bytes()
    content.decode("utf-8")  # before pyarrow, so that the error names the byte
    table = _parse_csv(content, path, text)
    if path.suffix.lower() == ".tsv":
        _require_closed_quotes(table)
    columns, numbers = _columns(table), _numeric(table)
    for name, values in columns.items():
        if name not in text and not _MISSING.isdisjoint(values) and all(map(_is_number, {*values} - _MISSING)):
            columns[name] = [None if value in _MISSING else value for value in values]
    if not numbers:
        return columns
    written = _parse_csv(content, path, numbers)
    # Different ids can be equal as numbers: 7 and 007; 1.1 and 1.10; ids of 20 digits, which are read as floats.
    floats = {name for name in numbers if name != label and pa.types.is_floating(table[name].type)}
    ids = (name for name in numbers if name in floats or _has_needless_zero(written[name]))
    return columns | {name: written[name].to_pylist() for name in ids}


def _parse_csv(content: bytes, path: Path, text: Sequence[str]) -> pa.Table:
    """Parses a CSV. Columns in `text` are read as text, the others as numbers, dates or text by their cells."""
    return pa_csv.read_csv(
        pa.BufferReader(content),
        # One block, because a column's type depends on all its rows. One thread, because errors then name the row.
        pa_csv.ReadOptions(block_size=min(len(content) + 1, 2**31 - 1), use_threads=False),
        pa_csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True),
        pa_csv.ConvertOptions(
            column_types=dict.fromkeys(text, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _require_closed_quotes(table: pa.Table) -> None:
    """Raises ValueError for a cell that contains tabs and line ends.

    In many .tsv files a quote is a plain character. A cell that begins with one would take in all rows up to the next
    quote.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_string(column.type):
            tabs, ends = (pa_compute.match_substring(column, mark) for mark in ("\t", "\n"))
            if (row := pa_compute.index(pa_compute.and_(tabs, ends), True).as_py()) >= 0:
                raise ValueError(
                    f"row {row + 1}, column '{name}': found a quote at its beginning, then tabs and line ends; "
                    f"if quotes are plain characters in this file, save it as JSON lines or as a quoted CSV"
                )


def _numeric(table: pa.Table) -> list[str]:
    kinds = zip(table.column_names, table.schema.types, strict=True)
    return [name for name, kind in kinds if pa.types.is_integer(kind) or pa.types.is_floating(kind)]


def _is_number(written: Any) -> bool:
    try:
        float(written)
    except (TypeError, ValueError):
        return False
    return True


def _has_needless_zero(written: pa.ChunkedArray) -> bool:
    return bool(pa_compute.any(pa_compute.match_substring_regex(written, r"^\s*[+-]?0[0-9]")).as_py())


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
            raise ValueError(f"row {row} is {record!r}, expected an object of column names and values")
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _read_parquet(path: Path, *_: object) -> Columns:
    return _columns(pa_parquet.ParquetFile(path).read())


def _declared_classes(path: Path) -> dict[str, tuple[str, ...]]:
    """Column -> class names, as the datasets library writes them into a parquet file."""
    if path.suffix.lower() != ".parquet":
        return {}
    written = json.loads((pa_parquet.read_schema(path).metadata or {}).get(b"huggingface", b"{}"))
    kinds = written.get("info", {}).get("features", {}).items()
    return {name: tuple(kind["names"]) for name, kind in kinds if isinstance(kind, dict) and kind.get("names")}


READERS: dict[str, Callable[[Path, Sequence[str], str], Columns]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
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
        file_of.setdefault("\n".join(text.splitlines()).strip(), file)
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
