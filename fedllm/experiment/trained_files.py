"""The folder of what a run has trained: adapter/ of a run with adapters, model/ of one that trains all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedllm.config.recipe import Recipe
from fedllm.models.adapter_files import save_adapter
from fedllm.models.loading import Backbone
from fedllm.models.model_files import save_model


def save_trained(recipe: Recipe, model: Any, folder: Path, backbone: Backbone, card: str | None) -> Path:
    """Writes the adapter, or the whole model, of a recipe's run to `folder`; see save_adapter and save_model."""
    if recipe.lora is None:
        return save_model(model, folder, backbone.tokenizer, card)
    return save_adapter(model, folder, backbone.base_name, backbone.tokenizer, card)
