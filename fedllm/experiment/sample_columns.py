"""Which columns of a file hold the samples, for a run that is trained already. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data import known_datasets
from fedllm.data.known_images import image_columns, reads_images


def text_columns(recipe: Recipe, given: Sequence[str] | None = None, image: str | None = None) -> tuple[str, ...]:
    """The columns of text: those `given`, else the ones of the run's own data. image: the option --image.

    Raises UserError for an image, and unless they are as many as the run was trained on.
    """
    if image is not None:
        raise UserError(f"--image={image}: found a run on texts, expected one on images; --text names its columns")
    own = known_datasets.text_columns(recipe.data)
    columns = tuple(given) if given else own
    if len(columns) != len(own):
        raise UserError(
            f"--text: found {len(columns)} columns ({', '.join(columns)}), expected {len(own)} as in the run's own "
            f"data ({', '.join(own)})"
        )
    return columns


def image_column(recipe: Recipe, file: Path, given: str | None, text: Sequence[str] | None) -> str:
    """The column of images: the one `given`, else that of the run's own data. text: the option --text.

    Raises UserError for a column of texts, and for a column of a folder, which has none.
    """
    assert reads_images(recipe.data), "a run on images"
    if text:
        raise UserError(f"--text={text[0]}: found a run on images, expected one on texts; --image names its column")
    if given is not None and file.is_dir():
        raise UserError(f"--image={given}: is for a column of a table, found the folder {file}; leave it out")
    return given or image_columns(recipe.data)[0]
