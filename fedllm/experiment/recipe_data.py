"""The data set of a recipe, and its samples once they are tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data.conversations.templates import is_template_file, read_template
from fedllm.data.loading import Dataset, load_dataset
from fedllm.data.partition_file import group_column
from fedllm.data.pixels import Pixels
from fedllm.data.samples import Samples
from fedllm.data.settings import CAUSAL_LM

Parts = list[np.ndarray]


def grouped_by(recipe: Recipe) -> str | None:
    """The column whose values stand in for labels; None for data with labels."""
    return group_column(recipe.partition) if recipe.data.task == CAUSAL_LM else None


def read_data(recipe: Recipe, progress: ProgressCallback | None = None) -> Dataset:
    """The data set of a recipe. Raises UserError, see load_dataset."""
    return load_dataset(recipe.data, recipe.run.local_hub, progress, group_column=grouped_by(recipe))


def template_digest(recipe: Recipe) -> dict[str, str]:
    """sha256 of the recipe's own chat template, named "template"; {} where it is not a file."""
    name = recipe.data.template
    if name is None or not is_template_file(name):
        return {}
    return {"template": hashlib.sha256(read_template(name).encode()).hexdigest()}


def without_left_out(tokens: Samples) -> Samples:
    """The samples that the task did not leave out; of images all."""
    if isinstance(tokens, Pixels) or bool(tokens.sizes.all()):
        return tokens
    return tokens.take(tokens.sizes.nonzero()[:, 0])


def settle_samples(
    dataset: Dataset, parts: Sequence[np.ndarray], tokens: Sequence[Samples]
) -> tuple[Dataset, Parts, Samples, Samples]:
    """The data set, the clients' samples and the tokens of both splits, without the samples that the task left out.

    parts: each client's samples, indices into the training split. tokens: of the training and the validation split.
    The notes of the tokens become notes of the data set. Its fingerprint stays that of all training samples, and its
    validation split stays whole, so that their digests do not depend on the model.
    """
    train, validation = tokens
    notes = [
        f"{role}: {note}" for role, each in zip(("training", "validation"), tokens, strict=True) for note in each.notes
    ]
    dataset = replace(dataset, notes=(*dataset.notes, *notes))
    kept = train.sizes.numpy() > 0
    if not kept.all():
        places = np.cumsum(kept) - 1
        parts = [places[part[kept[part]]] for part in parts]
        dataset = replace(dataset, train=dataset.train.take(np.flatnonzero(kept)))
    return dataset, list(parts), without_left_out(train), without_left_out(validation)


def require_samples(parts: Parts, recipe: Recipe) -> None:
    """Raises UserError for a client all of whose samples were left out. parts: each client's samples."""
    if empty := [client for client, part in enumerate(parts) if len(part) == 0]:
        raise UserError(
            f"data.too_long={recipe.data.too_long}: no sample of client {empty[0]} has a learned token within "
            f"data.max_length={recipe.data.max_length} ({len(empty):,} of {len(parts):,} clients); raise it"
        )
