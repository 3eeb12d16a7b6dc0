"""Splits of images from the tables that name or hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.data.image_decoding import decode_images
from fedllm.data.known_images import image_columns
from fedllm.data.labels import Coding
from fedllm.data.settings import DataSettings
from fedllm.data.split import Split
from fedllm.data.tables import Table


def read_image_splits(
    settings: DataSettings, tables: dict[str, Table], coding: Coding, progress: ProgressCallback | None = None
) -> dict[str, Split]:
    """The splits by role, the training split first, whose images' size all have; see decode_images.

    Raises UserError that names the row of an image that cannot be read, or of an unknown label.
    """
    (image, label), size = image_columns(settings), settings.image_size
    splits: dict[str, Split] = {}
    for role, table in tables.items():
        labels = coding.encode(table, label)
        images = decode_images(table, image, size, folder_of(table), progress=progress)
        size = images.shape[-1]
        splits[role] = Split([], labels, table.without(image, label), np.arange(1, len(table) + 1), images=images)
    return splits


def folder_of(table: Table) -> Path | None:
    """The folder of a table that was read from a file, or the folder that it was read from; None for one of a hub."""
    path = Path(table.source)
    return path if path.is_dir() else path.parent if path.is_file() else None
