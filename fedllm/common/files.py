"""Writes files completely or not at all, and computes their digests. Tensors are stored as safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.common.errors import RunError

if TYPE_CHECKING:
    from fedllm.common.tensors import State


def write_tensors(path: Path, tensors: State) -> str:
    """Writes a safetensors file and returns its sha256. The data may still be in the page cache, see `sync`."""
    from safetensors.torch import save_file  # here: text is written by commands that need no torch

    from fedllm.common.tensors import plain

    save_file(plain(tensors), path)
    return digest(path)


def write_text(path: Path, text: str) -> str:
    """Writes a UTF-8 text, waits until it is on the disk, and returns its sha256."""
    path.write_text(text, encoding="utf-8")
    sync(path)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` with a text in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Writes a temporary file and renames it, so that a reader never sees a part of it. Raises RunError on failure."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        sync(aside)
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of `folder` where the block ends without an error.

    A reader never finds a part of it. After an error, what was there before is there again."""
    aside, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{part}") for part in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def link(source: Path, target: Path) -> None:
    """Makes a hard link to a file that never changes, or a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
