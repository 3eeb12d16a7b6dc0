"""Decodes images once, with Pillow, into one array of bytes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.data.known_images import MOST_SIDE
from fedllm.data.tables import Table

MOST_PIXELS = 50_000_000  # of one image file; a larger one is refused before it is decoded
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # none that runs a program, as EPS does
_EVERY = 1000  # images between two reports of progress


def require_pillow() -> None:
    """Raises UserError unless Pillow can be imported."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError("images need Pillow; run: pip install 'fedllm[vision]'") from error


def decode_images(
    table: Table, column: str, size: int | None, folder: Path | None, progress: ProgressCallback | None = None
) -> np.ndarray:
    """The images of a column as uint8 [n, 3, H, W] in red, green and blue, H = W.

    A value is the bytes of an image file, {"bytes", "path"} as the datasets library stores one, or the path of a file
    below `folder`, that of the table. size: H; other images are resized to it (bilinear, without keeping the ratio of
    their sides). None: the size of the first image, square, which all must have.

    Raises UserError naming the row: no image, an unknown or damaged file, too many pixels, or another size.
    """
    require_pillow()
    values = table.column(column, "data.image")
    found: np.ndarray | None = None
    for row, value in enumerate(values):
        where = f"{table.source}, row {row + 1}, column '{column}'"
        if folder is not None and isinstance(value, str):
            where += f" ({value})"
        pixels = _decode(where, _content(where, value, folder), size)
        if found is None:
            found = np.empty((len(values), 3, *pixels.shape[:2]), np.uint8)
            _check_first(where, pixels, size)
        if pixels.shape[:2] != found.shape[2:]:
            raise UserError(
                f"{where}: found an image of {_size(pixels)} pixels, but the first has {found.shape[3]} x "
                f"{found.shape[2]}; expected one size, or data.image_size, to which all are resized"
            )
        found[row] = pixels.transpose(2, 0, 1)
        if progress and row % _EVERY == 0:
            progress("decoding images", row, len(values))
    assert found is not None, "a table has rows"
    return found


def _check_first(where: str, pixels: np.ndarray, size: int | None) -> None:
    height, width = pixels.shape[:2]
    if size is None and (height != width or height > MOST_SIDE):
        raise UserError(
            f"{where}: found an image of {_size(pixels)} pixels, expected a square of at most {MOST_SIDE}; set "
            f"data.image_size, to which all are resized"
        )


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[0]}"


def _content(where: str, value: Any, folder: Path | None) -> bytes:
    """The bytes of an image file."""
    if isinstance(value, dict) and {"bytes", "path"} & value.keys():
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or folder is None:
        kind = type(value).__name__
        raise UserError(
            f"{where}: found a value of type {kind}, expected the bytes of an image or the path of one; data.image "
            f"names the column to read"
        )
    path = (folder / value).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise UserError(f"{where}: no such image in {folder}, expected the path of one from there")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error


def _decode(where: str, content: bytes, size: int | None) -> np.ndarray:
    """uint8 [H, W, 3]; the first frame of several, turned upright as the file says."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns from 89 million pixels on; ours is the lower limit
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                upright = ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{where}: found an image too large to decode, expected at most {MOST_PIXELS:,} pixels"
        ) from error
    except Exception as error:  # Pillow's readers raise many types for a damaged file
        raise UserError(
            f"{where}: is no image that can be read ({type(error).__name__}), expected {', '.join(_FORMATS)}"
        ) from error
    if size is not None and upright.size != (size, size):
        upright = upright.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(upright)
