"""Folders of image files, one folder per class, as tables; and where a table's images lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.data.arrow_files import PLAIN_CSV, CsvForm
from fedllm.data.tables import Table, read_table

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def read_image_table(path: Path, image: str, label: str, form: CsvForm = PLAIN_CSV) -> Table:
    """A table file, or a folder with one folder of images per class as the columns `image`, `label` and file.

    The images of a folder are named by path; they are not opened. Raises UserError as tables.read_table.
    """
    if not path.is_dir():
        return read_table(path, label=label, form=form)
    files = sorted(file for folder in _class_folders(path) for file in folder.iterdir() if _is_image(file))
    if not files:
        raise UserError(f"{path}: expected one folder per class with images in it ({', '.join(SUFFIXES)}), found none")
    names = [file.relative_to(path).as_posix() for file in files]
    return Table(str(path), {image: list(names), label: [file.parent.name for file in files], "file": names})


def image_splits(path: Path) -> dict[str, Path]:
    """The folders in `path` that are splits, by name: folders that hold folders of images."""
    if not path.is_dir():
        return {}
    return {folder.name: folder for folder in _folders(path) if _class_folders(folder)}


def images_below(path: Path) -> list[Path]:
    """The image files in a folder and in the folders below it, sorted; hidden ones are left out."""
    return sorted(
        file
        for file in path.rglob("*")
        if _is_image(file) and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _class_folders(path: Path) -> Sequence[Path]:
    return [folder for folder in _folders(path) if any(map(_is_image, folder.iterdir()))]


def _folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
