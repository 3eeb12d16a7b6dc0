"""The adapter of a run's newest checkpoint, finished or not."""

from __future__ import annotations

from pathlib import Path

from fedllm.console import warn
from fedllm.data import load_task
from fedllm.errors import UserError
from fedllm.export import save_adapter
from fedllm.lora import attach_lora
from fedllm.models import load_backbone
from fedllm.recipe import load_recipe
from fedllm.space import ParameterSpace
from fedllm.state import Checkpoints


def export_adapter(folder: Path, out: Path | None = None) -> Path:
    """Writes the adapter of a run's newest good checkpoint, finished or not, to `out`, default <run>/adapter.

    It takes the base model, and not the data. Raises UserError for what is not a run with a checkpoint.
    """
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder}: not a run folder (it has no recipe.yaml)")
    checkpoints = Checkpoints(folder / "checkpoints", warn)
    snapshot = checkpoints.latest()
    if snapshot is None:
        raise UserError(f"{folder}: has no whole checkpoint to export")
    recipe = load_recipe(folder / "recipe.yaml")
    if "labels" in snapshot.facts:
        labels = snapshot.facts["labels"]
    else:  # a checkpoint from before they were kept
        labels = load_task(recipe.data, recipe.run.local_hub).label_names
    backbone = load_backbone(
        recipe.model,
        num_labels=len(labels) or 1,
        regression=not labels,
        label_names=labels or None,
        local_hub=recipe.run.local_hub,
        seed=recipe.run.seed,
    )
    model = attach_lora(backbone, recipe.lora, seed=recipe.run.seed)
    space = ParameterSpace.of(model)
    if len(snapshot.x) != space.dim:
        raise UserError(
            f"{folder}: its checkpoint has {len(snapshot.x):,} trainable values, but {recipe.model.name} with the "
            f"run's adapters has {space.dim:,}: the model is not what it was"
        )
    space.scatter(model, snapshot.x)
    return save_adapter(model, out or folder / "adapter", backbone.base_name, backbone.tokenizer)
