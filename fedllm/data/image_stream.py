"""The images of a file or a folder, checked and decoded some rows at a time, so that it may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedllm.common.errors import UserError
from fedllm.data import row_stream
from fedllm.data.arrow_files import PLAIN_CSV, CsvForm
from fedllm.data.image_decoding import check_image, decode_image, place
from fedllm.data.image_files import SUFFIXES, images_below
from fedllm.data.row_stream import Chunk

FILE = "file"  # the column of a folder's images
_MOST_BYTES = 2**26  # of the decoded images of a chunk, where one image alone has not more


@dataclass(frozen=True)
class ImageColumn:
    """Where the images of a file are. name: their column. folder: what their paths begin at. size: the side in pixels
    to which they are resized. form: how a CSV file is written."""

    name: str
    folder: Path
    size: int
    form: CsvForm = PLAIN_CSV

    @classmethod
    def of(cls, file: Path, column: str, size: int, form: CsvForm = PLAIN_CSV) -> ImageColumn:
        """The images of a table, in `column`, or of a folder, which has the one column `FILE`."""
        return cls(FILE, file, size) if file.is_dir() else cls(column, file.parent, size, form)

    def chunks(self, file: Path) -> Iterator[Chunk]:
        """The rows of a table, or the images in a folder and below it, in their order. Raises UserError."""
        most = max(1, min(row_stream.CHUNK, _MOST_BYTES // (3 * self.size**2)))
        for chunk in _folder(file) if file.is_dir() else row_stream.read_chunks(file, self.form):
            for begin in range(0, len(chunk.records), most):
                rows = slice(begin, begin + most)
                table = None if chunk.table is None else chunk.table.slice(begin, most)
                yield Chunk(chunk.source, chunk.first + begin, chunk.records[rows], table)

    def check(self, chunk: Chunk) -> None:
        """Raises UserError that names the first row without an image. Pixels are not decoded."""
        for where, value in self._values(chunk):
            check_image(where, value, self.folder)

    def decode(self, chunk: Chunk) -> np.ndarray:
        """uint8 [n, 3, size, size] in red, green and blue. Raises UserError that names the first damaged image."""
        found = [decode_image(where, value, self.folder, self.size) for where, value in self._values(chunk)]
        return np.stack(found).transpose(0, 3, 1, 2)

    def without_bytes(self, chunk: Chunk) -> Chunk:
        """The chunk with the paths of images in the place of their bytes, None where there is no path."""
        return replace(chunk, records=[{**each, self.name: _path(each[self.name])} for each in chunk.records])

    def _values(self, chunk: Chunk) -> Iterator[tuple[str, Any]]:
        for row, record in enumerate(chunk.records, chunk.first):
            value = record.get(self.name)
            yield place(chunk.source, row, self.name, value), value


def _path(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("path")
    return value if isinstance(value, str) else None


def _folder(path: Path) -> Iterator[Chunk]:
    names = [file.relative_to(path).as_posix() for file in images_below(path)]
    if not names:
        raise UserError(f"{path}: expected images in the folder ({', '.join(SUFFIXES)}), found none")
    yield Chunk(str(path), 1, [{FILE: name} for name in names])
