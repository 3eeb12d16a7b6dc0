"""Exports the adapter of a run's newest checkpoint. The run may be unfinished."""

from __future__ import annotations

from pathlib import Path

from fedllm.common.console import warn
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.data.loading import load_dataset
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.models.adapter_files import save_adapter
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.results.reader import require_run_folder
from fedllm.tasks.selection import task_of


def export_adapter(folder: Path, out: Path | None = None) -> Path:
    """Writes the adapter of a run's newest intact checkpoint to `out`, by default <run>/adapter.

    The run may be unfinished. It loads the base model; it needs no data.
    Raises UserError if `folder` is not a run with a checkpoint.
    """
    require_run_folder(folder)
    checkpoints = Checkpoints(folder / "checkpoints", warn)
    snapshot = checkpoints.latest()
    if snapshot is None:
        raise UserError(f"{folder}: has no whole checkpoint to export")
    recipe = load_recipe(folder / "recipe.yaml")
    classes = snapshot.facts.labels
    if classes is None:  # an older checkpoint, without labels: they come from the data
        classes = list(load_dataset(recipe.data, recipe.run.local_hub).classes)
    head = task_of(recipe.data, classes).head
    backbone = load_backbone(recipe.model, head, local_hub=recipe.run.local_hub, seed=recipe.run.seed)
    model = attach_lora(backbone, recipe.lora, seed=recipe.run.seed)
    space = ParameterSpace.of(model)
    if len(snapshot.x) != space.dim:
        raise UserError(
            f"{folder}: its checkpoint has {len(snapshot.x):,} trainable values, but {recipe.model.name} with the "
            f"run's adapters has {space.dim:,}: the model is not what it was"
        )
    space.scatter(model, snapshot.x)
    return save_adapter(model, out or folder / "adapter", backbone.base_name, backbone.tokenizer)
