"""A folder of clients: a table file or a folder of class folders per client, read as one table with their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedllm.common.errors import UserError, listed
from fedllm.data.image_files import SUFFIXES
from fedllm.data.tables import READERS, Table

CLIENT = "client"
_IN_CLASSES = (".txt", *SUFFIXES)  # what class folders hold


def read_part(path: Path, read: Callable[[Path], Table]) -> Table:
    """The table at `path`; of a folder of clients all their rows, and whose each is in the column `client`.

    read: reads one table file or folder of class folders. Raises UserError as it does, and for clients with the same
    name, other columns or other classes than the first.
    """
    clients = _clients(path)
    if not clients:
        return read(path)
    names = [each.name if each.is_dir() else each.stem for each in clients]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: found two files or folders of client '{twice[0]}', expected one per client")
    return _joined(path, clients, names, [_below(path, read(each)) for each in clients])


def _clients(path: Path) -> list[Path]:
    """The table files and folders of class folders in a folder, sorted; [] if `path` is none or has class folders."""
    if not path.is_dir() or _has_class_folders(path):
        return []
    within = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    return [
        each
        for each in within
        if (each.is_file() and each.suffix.lower() in READERS) or (each.is_dir() and _has_class_folders(each))
    ]


def _has_class_folders(path: Path) -> bool:
    return any(file.suffix.lower() in _IN_CLASSES and not file.name.startswith(".") for file in path.glob("[!.]*/*"))


def _below(folder: Path, table: Table) -> Table:
    """The table of a client, whose columns of file names, if it was read from a folder, begin at `folder`."""
    source = Path(table.source)
    if not source.is_dir():
        return table
    files = table.columns["file"]
    below = [f"{source.relative_to(folder).as_posix()}/{file}" for file in files]
    return replace(
        table, columns={name: below if values == files else values for name, values in table.columns.items()}
    )


def _joined(folder: Path, clients: list[Path], names: list[str], tables: list[Table]) -> Table:
    for table in tables:
        _check_alike(table, tables[0])
    columns = {column: [value for table in tables for value in table.columns[column]] for column in tables[0].columns}
    columns[CLIENT] = [name for name, table in zip(names, tables, strict=True) for _ in range(len(table))]
    return Table(
        str(folder),
        columns,
        tables[0].classes,
        notes=tuple(note for table in tables for note in table.notes),
        origins=tuple((each.name, len(table)) for each, table in zip(clients, tables, strict=True)),
    )


def _check_alike(table: Table, first: Table) -> None:
    if CLIENT in table.columns:
        raise UserError(
            f"{table.source}: has a column '{CLIENT}', which in a folder of clients comes from the files' names; "
            "rename the column"
        )
    if table.columns.keys() != first.columns.keys():
        raise UserError(
            f"{table.source}: found the columns {listed(list(table.columns), 20)}, expected those of {first.source}: "
            f"{listed(list(first.columns), 20)}"
        )
    if table.classes != first.classes:
        raise UserError(f"{table.source}: declares other classes than {first.source}, expected the same")
