"""Files that are whole or not there, with their digests; tensors as safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from fedllm.algorithms.base import State
from fedllm.errors import RunError


def write_tensors(path: Path, tensors: State) -> str:
    """Writes a safetensors file; its sha256. Not yet surely on the disk, see `sync`."""
    save_file(plain(tensors), path)
    return digest(path)


def plain(tensors: State) -> State:
    """The tensors as safetensors wants them: contiguous, on the CPU, each in memory of its own."""
    found = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if len({value.untyped_storage().data_ptr() for value in found.values()}) < len(found):
        found = {name: value.clone() for name, value in found.items()}
    return found


def write_text(path: Path, text: str) -> str:
    """Writes a file through to the disk; its sha256."""
    path.write_text(text, encoding="utf-8")
    sync(path)
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of a text in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Writes a file aside and renames it, so that it is never half written. RunError where it cannot be written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        sync(aside)
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error


def link(source: Path, target: Path) -> None:
    """A second name for a file that nobody changes; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Returns once a file, or the names in a folder, are on the disk."""
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
