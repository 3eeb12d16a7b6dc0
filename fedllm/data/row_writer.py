"""Writes a table chunk by chunk, with columns added, completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from fedllm.common.errors import UserError
from fedllm.common.files import sync
from fedllm.data.arrow_files import separator
from fedllm.data.row_stream import Chunk

Added = Mapping[str, list[Any]]
Write = Callable[[Chunk, Added], None]
"""Writes a chunk with the added columns, each with one value per row."""


@contextlib.contextmanager
def writing(path: Path, names: Sequence[str], added: Mapping[str, type]) -> Iterator[Write]:
    """A function that writes the rows of a .csv, .tsv, .jsonl or .parquet file, which appears when the context ends.

    names: the columns of the chunks. added: the columns that each call adds, with their type, str or float. If an
    error ends the context, `path` stays as it was.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    kind = path.suffix.lower()
    try:
        with contextlib.ExitStack() as stack:
            if kind == ".parquet":
                yield _parquet_writer(stack, aside, path, names, added)
            else:
                file = stack.enter_context(aside.open("w", encoding="utf-8", newline=""))
                if kind == ".jsonl":
                    yield _json_writer(file)
                else:
                    yield _csv_writer(file, separator(path), [*names, *added])
        sync(aside)
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def _rows(chunk: Chunk, added: Added) -> Iterator[dict[str, Any]]:
    for row, record in enumerate(chunk.records):
        yield {**record, **{name: values[row] for name, values in added.items()}}


def _json_writer(file: Any) -> Write:
    def write(chunk: Chunk, added: Added) -> None:
        file.writelines(f"{json.dumps(row, ensure_ascii=False, default=str)}\n" for row in _rows(chunk, added))

    return write


def _csv_writer(file: Any, between: str, names: Sequence[str]) -> Write:
    def line(values: Iterator[Any]) -> str:
        return between.join(_cell(value, between) for value in values) + "\n"

    def write(chunk: Chunk, added: Added) -> None:
        file.writelines(line(row.get(name) for name in names) for row in _rows(chunk, added))

    file.write(line(iter(names)))
    return write


def _cell(value: Any, between: str) -> str:
    """A value as a cell: nothing is an empty cell, and the empty text one in quotes."""
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)
    quoted = not text or not {between, '"', "\n", "\r"}.isdisjoint(text)
    return '"' + text.replace('"', '""') + '"' if quoted else text


def _parquet_writer(
    stack: contextlib.ExitStack, aside: Path, path: Path, names: Sequence[str], added: Mapping[str, type]
) -> Write:
    """The types are those of the input if it is a parquet file, else those of the first chunk."""
    kinds = {name: pa.string() if kind is str else pa.float64() for name, kind in added.items()}
    opened: list[pa_parquet.ParquetWriter] = []

    def write(chunk: Chunk, more: Added) -> None:
        table = chunk.table
        if table is None:
            columns = {name: [record.get(name) for record in chunk.records] for name in names}
            schema = opened[0].schema if opened else None
            arrays = [_array(columns[name], schema and schema.field(name).type, name, chunk, path) for name in names]
            table = pa.Table.from_arrays(arrays, names=list(names))
        for name, kind in kinds.items():
            table = table.append_column(name, pa.array(more[name], kind))
        table = table.replace_schema_metadata(None)  # what libraries noted in it is of the input's columns alone
        if not opened:
            opened.append(stack.enter_context(pa_parquet.ParquetWriter(aside, table.schema)))
        opened[0].write_table(table)

    return write


def _array(values: list[Any], kind: pa.DataType | None, name: str, chunk: Chunk, path: Path) -> pa.Array:
    try:
        found = pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise UserError(
            f"{chunk.source}, rows {chunk.first} to {chunk.first + len(values) - 1}, column '{name}': found values of "
            f"different types, which {path.suffix} does not hold; write a .jsonl file instead"
        ) from error
    return pa.array(values, pa.string()) if pa.types.is_null(found.type) else found
