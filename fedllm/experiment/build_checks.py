"""Checks that the parts of a recipe fit together, once its data and its model are read."""

from __future__ import annotations

import numpy as np

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.config.recipe import Recipe
from fedllm.data.loading import Dataset
from fedllm.models.loading import Backbone
from fedllm.tasks.base import LOSS, Task


def check_evaluation(recipe: Recipe, task: Task, dataset: Dataset) -> None:
    settings, columns = recipe.eval, list(dataset.validation.columns)
    if recipe.deployment.keep_local is not None:
        _check_personal(recipe)
    if settings.by is not None and settings.by not in columns:
        raise UserError(
            f"eval.by: found '{settings.by}'{nearest(settings.by, columns)}, expected a column of the validation "
            f"split: {', '.join(columns) or 'it has none beside the samples and their labels'}"
        )
    if settings.by_class and not task.classes:
        raise UserError(
            f"eval.by_class: found true, but {dataset.name} has no classes: its task is {task.describe()}; leave it out"
        )
    if settings.samples and not task.generates:
        raise UserError(
            f"eval.samples: found {settings.samples}, but only a language model answers prompts; leave it out for "
            f"{dataset.name}"
        )
    known = (*task.metric_names, LOSS)
    named = [("target", name) for name in settings.target or {}] + [("metric", settings.metric or known[0])]
    for key, name in named:
        if name not in known:
            raise UserError(f"eval.{key}: found metric '{name}', expected one of {', '.join(known)} for {dataset.name}")


def _check_personal(recipe: Recipe) -> None:
    """Raises UserError for what only one model for all clients can give."""
    for key in ("start", "by", "by_class", "samples"):
        if wanted := getattr(recipe.eval, key):
            raise UserError(
                f"eval.{key}: found {wanted}, but with deployment.keep_local each client has a model of its own; leave "
                "it out"
            )


def check_parts(parts: list[np.ndarray], recipe: Recipe) -> None:
    source = recipe.partition.file or f"partition.scheme={recipe.partition.scheme}"
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(f"{source}: client {client} has no samples; set partition.min_size to 1 or more")


def check_length(recipe: Recipe, backbone: Backbone) -> None:
    limit = backbone.max_length
    if limit is not None and recipe.data.max_length > limit:
        raise UserError(
            f"data.max_length: found {recipe.data.max_length}, but {recipe.model.name} has {limit} positions"
        )
