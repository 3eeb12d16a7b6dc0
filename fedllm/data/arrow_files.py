"""CSV and parquet files as plain columns, read with pyarrow.

pyarrow's errors about a CSV name the row, and it distinguishes an empty cell from a quoted empty text. pandas does
neither, and it pads short rows without an error.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from fedllm.common.errors import cut_name

Columns = dict[str, list[Any]]
_MISSING = {"NA", "N/A", "NULL", "null"}  # texts that mean a missing number
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
BYTE_ORDER_MARK = "\ufeff"
_WRONG_WIDTH = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")


@dataclass(frozen=True)
class CsvForm:
    """How CSV and TSV files are written. encoding: as Python names it. delimiter: None is a comma, or in .tsv a tab."""

    encoding: str = "utf-8"
    delimiter: str | None = None

    def separator(self, path: Path) -> str:
        """The character between cells."""
        return self.delimiter or separator(path)


PLAIN_CSV = CsvForm()


def read_csv(path: Path, text: Sequence[str], label: str, form: CsvForm = PLAIN_CSV) -> Columns:
    """The columns of a CSV or TSV file; see tables.read_table. Raises ValueError or UnicodeDecodeError."""
    content = path.read_bytes()
    decoded = content.decode(form.encoding)  # before pyarrow, so that the error names the byte
    if codecs.lookup(form.encoding).name != "utf-8":
        content = decoded.removeprefix(BYTE_ORDER_MARK).encode()
    require_separator(decoded.partition("\n")[0], form.separator(path), "set data.delimiter, or ")
    options = csv_options(form.separator(path), text)
    table = _parse_csv(content, options)
    if form.separator(path) == "\t":
        require_closed_quotes(table)
    columns, numbers = _columns(table), _numeric(table)
    for name, values in columns.items():
        if name not in text and not _MISSING.isdisjoint(values) and all(map(_is_number, {*values} - _MISSING)):
            columns[name] = [None if value in _MISSING else value for value in values]
    if not numbers:
        return columns
    written = _parse_csv(content, csv_options(form.separator(path), numbers))
    # Different ids can be equal as numbers: 7 and 007; 1.1 and 1.10; ids of 20 digits, which are read as floats.
    floats = {name for name in numbers if name != label and pa.types.is_floating(table[name].type)}
    ids = (name for name in numbers if name in floats or _has_needless_zero(written[name]))
    return columns | {name: written[name].to_pylist() for name in ids}


def _parse_csv(content: bytes, options: CsvOptions) -> pa.Table:
    """Parses a CSV. Columns without a type in the options are read as numbers, dates or text by their cells."""
    try:
        return pa_csv.read_csv(
            pa.BufferReader(content),
            # One block, because a column's type depends on all its rows. One thread, because errors then name the row.
            pa_csv.ReadOptions(block_size=min(len(content) + 1, 2**31 - 1), use_threads=False),
            *options,
        )
    except pa.ArrowInvalid as error:
        raise ValueError(without_cells(str(error))) from error


CsvOptions = tuple[pa_csv.ParseOptions, pa_csv.ConvertOptions]


def csv_options(separator: str, text: Sequence[str]) -> CsvOptions:
    """How a CSV or TSV file is read: columns in `text` as text, an unquoted empty cell as None."""
    return (
        pa_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        pa_csv.ConvertOptions(
            column_types=dict.fromkeys(text, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def without_cells(said: str) -> str:
    """What pyarrow said about a CSV, without the row's text. pyarrow counts the header as row 1."""
    if (found := _WRONG_WIDTH.search(said)) is None:
        return said.partition(":")[0]
    row, expected, width = map(int, found.groups())
    return (
        f"row {row - 1} has {width} columns, expected {expected} as in the header; "
        f"a cell that contains the separator or a line end must be in quotes"
    )


def separator(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def require_separator(header: str, separator: str, remedy: str = "") -> None:
    """Raises ValueError for a header that has another separator than the expected one. remedy: what helps, too."""
    other = max(_SEPARATORS, key=header.count)
    if separator in header or other not in header:
        return
    advice = {",": ", or name it .csv", "\t": ", or name it .tsv"}.get(other, "")
    wanted = _SEPARATORS.get(separator, repr(separator))
    raise ValueError(
        f"its columns are separated by {_SEPARATORS[other]}, expected {wanted}; {remedy}save it with {wanted}{advice}"
    )


def require_closed_quotes(table: pa.Table, before: int = 0) -> None:
    """Raises ValueError for a cell that contains tabs and line ends. before: how many rows precede the table's.

    In many .tsv files a quote is a plain character. A cell that begins with one would take in all rows up to the next
    quote.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_string(column.type):
            tabs, ends = (pa_compute.match_substring(column, mark) for mark in ("\t", "\n"))
            if (row := pa_compute.index(pa_compute.and_(tabs, ends), True).as_py()) >= 0:
                row += before + 1
                raise ValueError(
                    f"row {row}, column '{name}': found a quote at its beginning, then tabs and line ends; "
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


def read_parquet(path: Path, *_: object) -> Columns:
    """The columns of a parquet file."""
    return _columns(pa_parquet.ParquetFile(path).read())


def declared_classes(path: Path) -> dict[str, tuple[str, ...]]:
    """Column -> class names, as the datasets library writes them into a parquet file."""
    if path.suffix.lower() != ".parquet":
        return {}
    written = json.loads((pa_parquet.read_schema(path).metadata or {}).get(b"huggingface", b"{}"))
    kinds = written.get("info", {}).get("features", {}).items()
    return {name: tuple(kind["names"]) for name, kind in kinds if isinstance(kind, dict) and kind.get("names")}


def _columns(table: pa.Table) -> Columns:
    require_distinct(table.column_names)
    columns: Columns = table.to_pydict()
    return columns


def require_distinct(names: Sequence[str]) -> None:
    """Raises ValueError for a column name that is there twice."""
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"column '{cut_name(repeated[0])}' is there more than once")
