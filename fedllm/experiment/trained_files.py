"""The folder of what a run has trained: adapter/ of a run with adapters, model/ of one that trains all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedllm.config.recipe import Recipe
from fedllm.models.adapter_files import Processor, save_adapter
from fedllm.models.image_format import ImageProcessor
from fedllm.models.loading import Backbone
from fedllm.models.model_files import save_model
from fedllm.tasks.base import Task
from fedllm.tasks.image_classification import ImageClassification


def save_trained(recipe: Recipe, model: Any, folder: Path, backbone: Backbone, task: Task, card: str | None) -> Path:
    """Writes the adapter, or the whole model, of a recipe's run to `folder`; see save_adapter and save_model."""
    processor = processor_of(backbone, task)
    if recipe.lora is None:
        return save_model(model, folder, processor, card)
    return save_adapter(model, folder, backbone.base_name, processor, card)


def processor_of(backbone: Backbone, task: Task) -> Processor | None:
    """What turns texts or images into the model's inputs, as the run did: a tokenizer, or an image processor."""
    if isinstance(task, ImageClassification):
        assert backbone.images is not None
        return ImageProcessor(task.side(backbone.images), *task.normalisation(backbone.images))
    return backbone.tokenizer
