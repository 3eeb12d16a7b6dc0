"""Decodes images once, with Pillow, into one array of bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.data.image_files import SUFFIXES
from fedllm.data.known_images import MOST_SIDE
from fedllm.data.tables import Table

KEY = "data.image"
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
    table: Table,
    column: str,
    size: int | None,
    folder: Path | None,
    *,
    key: str = KEY,
    progress: ProgressCallback | None = None,
) -> np.ndarray:
    """The images of a column as uint8 [n, 3, H, W] in red, green and blue, H = W.

    A value is the bytes of an image file, {"bytes", "path"} as the datasets library stores one, or the path of a file
    below `folder`, that of the table. size: H; other images are resized to it (bilinear, without keeping the ratio of
    their sides). None: the size of the first image, square, which all must have. key: the recipe key or option that
    names the column.

    Raises UserError naming the row: no image, an unknown or damaged file, too many pixels, or another size.
    """
    require_pillow()
    values = table.column(column, key)
    found: np.ndarray | None = None
    for row, value in enumerate(values):
        where = place(table.source, row + 1, column, value)
        pixels = decode_image(where, value, folder, size)
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


def place(source: str, row: int, column: str, value: Any) -> str:
    """How errors name the image of a row, from 1; with its path where the table gives one, and no other text."""
    is_path = isinstance(value, str) and Path(value).suffix.lower() in SUFFIXES
    return f"{source}, row {row}, column '{column}'" + (f" ({value})" if is_path else "")


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
        found = "no value" if value is None else f"a value of type {type(value).__name__}"
        raise UserError(
            f"{where}: found {found}, expected the bytes of an image or the path of one; name another column"
        )
    path = (folder / value).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise UserError(f"{where}: no such image in {folder}, expected the path of one from there")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error


def check_image(where: str, value: Any, folder: Path | None) -> None:
    """Raises UserError unless `value` is an image by its first bytes, of which nothing more is decoded.

    The arguments are those of decode_image.
    """
    with _opened(where, _content(where, value, folder)):
        pass


def decode_image(where: str, value: Any, folder: Path | None, size: int | None) -> np.ndarray:
    """One image as uint8 [H, W, 3]; the first frame of several, turned upright as the file says.

    where: what errors call it. value: see decode_images. size: H and W; None for those of the file.
    """
    from PIL import Image, ImageOps

    with _opened(where, _content(where, value, folder)) as image:
        upright = _eight_bits(where, ImageOps.exif_transpose(image)).convert("RGB")
    if size is not None and upright.size != (size, size):
        upright = upright.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(upright)


def _eight_bits(where: str, image: Any) -> Any:
    """The image with 8 bits a channel: of 16 the high 8, where Pillow would make white of all values above 255."""
    if image.mode in ("I", "F"):
        raise UserError(f"{where}: found pixels of 32 bits, expected 8 or 16; save the image with 8 bits a channel")
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


@contextmanager
def _opened(where: str, content: bytes) -> Iterator[Any]:
    """The image of a file's bytes. What Pillow raises inside becomes a UserError."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns from 89 million pixels on; ours is the lower limit
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                yield image
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{where}: found an image too large to decode, expected at most {MOST_PIXELS:,} pixels"
        ) from error
    except UserError:
        raise
    except Exception as error:  # Pillow's readers raise many types for a damaged file
        raise UserError(
            f"{where}: is no image that can be read ({type(error).__name__}), expected {', '.join(_FORMATS)}"
        ) from error
