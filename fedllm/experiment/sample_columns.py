"""Which columns of a file hold the samples, for a run that is trained already. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data import known_datasets
from fedllm.data.known_images import reads_images


def text_columns(recipe: Recipe, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """The columns of text: those `given`, else the ones of the run's own data.

    Raises UserError for a run on images, and unless they are as many as the run was trained on.
    """
    if reads_images(recipe.data):
        raise UserError(
            "found a run on images, expected one on texts, whose files this command reads; `fedllm evaluate RUN` "
            "scores the run's own validation images, and its folder adapter/ says how to use the model"
        )
    own = known_datasets.text_columns(recipe.data)
    columns = tuple(given) if given else own
    if len(columns) != len(own):
        raise UserError(
            f"--text: found {len(columns)} columns ({', '.join(columns)}), expected {len(own)} as in the run's own "
            f"data ({', '.join(own)})"
        )
    return columns
