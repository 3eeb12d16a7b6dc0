"""Checks the paths of tables that a command reads and writes, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedllm.common.errors import UserError

READ = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
WRITTEN = (".csv", ".tsv", ".jsonl", ".parquet")


def require_table(path: Path, *, folder: bool = False) -> None:
    """Raises UserError unless `path` is a file of a known kind, not empty. folder: whether it may be a folder."""
    if folder and path.is_dir():
        return
    if not path.exists():
        raise UserError(f"{path}: no such file" + ("" if path.is_absolute() else f" ({path.absolute()})"))
    if not path.is_file():
        raise UserError(f"{path}: is no file, expected one of {', '.join(READ)}")
    _require_suffix(path, READ, "read")
    if not path.stat().st_size:
        raise UserError(f"{path}: the file is empty")


def require_new_table(out: Path, source: Path) -> None:
    """Raises UserError unless a table made from `source` can be written to `out`. A file there will be replaced."""
    require_writable(out)
    _require_suffix(out, WRITTEN, "write")
    if out.exists() and out.samefile(source):
        raise UserError(f"--out={out}: is the input, which is not overwritten; name another file")


def require_writable(out: Path) -> None:
    """Raises UserError if `out` is a folder, or in a folder that is missing or may not be written to."""
    if out.is_dir():
        raise UserError(f"--out={out}: is a folder, expected the name of a file")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UserError(f"--out={out}: no such folder: {parent}; make it first, or name another")
    if not os.access(parent, os.W_OK):
        raise UserError(f"--out={out}: {parent} cannot be written to; name another folder")


def _require_suffix(path: Path, known: Sequence[str], verb: str) -> None:
    if path.suffix.lower() not in known:
        raise UserError(f"{path}: cannot {verb} '{path.suffix}' files; expected one of {', '.join(known)}")
