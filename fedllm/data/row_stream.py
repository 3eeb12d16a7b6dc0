"""Reads a table in chunks of rows, so that its size does not matter, and keeps its cells as they are.

A CSV's cells stay text. Errors count rows from 1, without the header line, and never show a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from fedllm.common.errors import UserError, listed
from fedllm.common.schema import nearest
from fedllm.data.arrow_files import (
    BYTE_ORDER_MARK,
    PLAIN_CSV,
    CsvForm,
    csv_options,
    require_closed_quotes,
    require_distinct,
    require_separator,
    without_cells,
)

CHUNK = 1000  # rows
_BLOCK = 16 * 2**20  # bytes of a CSV that are parsed together; a longer row is refused

Record = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a table. first: the number of the first one. table: the same rows, of a parquet file."""

    source: str
    first: int
    records: list[Record]
    table: pa.Table | None = None

    def texts(self, name: str) -> list[str]:
        """A column of text. Raises UserError that names the first row whose value is missing or no readable text."""
        values = [record.get(name) for record in self.records]
        for row, value in enumerate(values, self.first):
            found = _fault(value)
            if found:
                raise UserError(f"{self.source}, row {row}, column '{name}': found {found}, expected readable text")
        return values  # type: ignore[return-value]


def _fault(value: Any) -> str:
    if value is None:
        return "no value"
    if type(value) is not str:
        return f"a value of type {type(value).__name__}"
    if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        return "half of a surrogate pair"
    return ""


@dataclass(frozen=True)
class TableOutline:
    """The number of rows of a table, and the names of its columns in their order."""

    rows: int
    names: tuple[str, ...]


def outline(path: Path, text: Sequence[str], form: CsvForm = PLAIN_CSV) -> TableOutline:
    """Reads a whole table once and checks that its columns `text` are texts.

    Raises UserError for a file that does not parse or has no rows, a missing column, and a value that is no text.
    """
    return outline_of(path, read_chunks(path, form), dict.fromkeys(text, "--text"), Chunk.texts)


def outline_of(
    path: Path, chunks: Iterable[Chunk], columns: Mapping[str, str], check: Callable[[Chunk, str], object]
) -> TableOutline:
    """Reads all chunks of a table once and checks its `columns`, each with the option that names it.

    check: called with each chunk and column, raises UserError for a bad value. Raises UserError for no rows, and for a
    missing column.
    """
    rows, names = 0, dict[str, None]()
    for chunk in chunks:
        names |= dict.fromkeys(name for record in chunk.records for name in record)
        for column, option in columns.items():
            if column not in names:
                raise UserError(
                    f"{option}: {path} has no column '{column}'{nearest(column, list(names))}; its columns: "
                    f"{listed(list(names), 20)}"
                )
            check(chunk, column)
        rows += len(chunk.records)
    if not rows:
        raise UserError(f"{path}: the file holds no rows")
    return TableOutline(rows, tuple(names))


def read_chunks(path: Path, form: CsvForm = PLAIN_CSV) -> Iterator[Chunk]:
    """The rows of a .csv, .tsv, .json, .jsonl or .parquet file, in order, CHUNK at a time.

    CSV: written as `form` says. JSON: one object per line, or one list of objects, which is read whole. Raises
    UserError for a file that does not parse.
    """
    first = 1
    try:
        for records, table in _READERS[path.suffix.lower()](path, form):
            yield Chunk(str(path), first, records, table)
            first += len(records)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not {form.encoding} text; save it as {form.encoding}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: its values nest too deeply") from error
    except (ValueError, OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a readable {path.suffix} file: {error}") from error


_Rows = Iterator[tuple[list[Record], pa.Table | None]]


def _read_csv(path: Path, form: CsvForm) -> _Rows:
    with path.open(encoding=form.encoding) as file:
        require_separator(file.readline().removeprefix(BYTE_ORDER_MARK), form.separator(path))
    try:
        names = _open_csv(path, (), form).schema.names
        require_distinct(names)
        reader = _open_csv(path, names, form)
        rows = 0
        for batch in reader:
            if form.separator(path) == "\t":
                require_closed_quotes(pa.Table.from_batches([batch]), rows)
            rows += batch.num_rows
            for start in range(0, batch.num_rows, CHUNK):
                yield batch.slice(start, CHUNK).to_pylist(), None
    except pa.ArrowInvalid as error:
        if "invalid UTF8" in str(error):
            raise ValueError(f"not {form.encoding} text; save it as {form.encoding}") from error
        if "straddling" in str(error):
            raise ValueError(f"a row has more than {_BLOCK // 2**20} MiB, or a quote is not closed") from error
        raise ValueError(without_cells(str(error))) from error


def _open_csv(path: Path, names: Sequence[str], form: CsvForm) -> pa_csv.CSVStreamingReader:
    """A reader of cells as text: an unquoted empty cell is None."""
    return pa_csv.open_csv(
        path,
        pa_csv.ReadOptions(block_size=_BLOCK, use_threads=False, encoding=form.encoding),
        *csv_options(form.separator(path), names),
    )


def _read_json(path: Path, _: CsvForm) -> _Rows:
    with path.open(encoding="utf-8-sig") as file:
        while (mark := file.read(1)).isspace():
            pass
        file.seek(0)
        found: Iterable[Any] = json.load(file) if mark == "[" else _lines(file)
        records = _objects(found)
        while rows := list(islice(records, CHUNK)):
            yield rows, None


def _lines(file: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"line {number}, column {error.colno}: {error.msg}; expected one object per line, or one list"
                ) from error


def _objects(found: Iterable[Any]) -> Iterator[Record]:
    for row, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ValueError(
                f"row {row} is of type {type(record).__name__}, expected an object of column names and values"
            )
        yield record


def _read_parquet(path: Path, _: CsvForm) -> _Rows:
    with pa_parquet.ParquetFile(path) as file:
        require_distinct(file.schema_arrow.names)
        for batch in file.iter_batches(CHUNK):
            yield batch.to_pylist(), pa.Table.from_batches([batch])


_READERS: dict[str, Callable[[Path, CsvForm], _Rows]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
