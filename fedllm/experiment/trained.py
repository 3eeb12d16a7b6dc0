"""The model that a run has trained, read from its newest checkpoint or from that of one round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from fedllm.common.console import stage, warn
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.data.conversations.templates import keep_template
from fedllm.data.loading import load_dataset
from fedllm.experiment.build import trainable
from fedllm.experiment.checkpoints import Checkpoints, Snapshot
from fedllm.experiment.model_card import TrainedOn, model_card
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.norms import write_statistics
from fedllm.results.kept_rounds import require_rounds
from fedllm.tasks.base import Task
from fedllm.tasks.selection import task_of


@dataclass(frozen=True)
class TrainedRun:
    """A run's model after some round, on the CPU and in eval mode. round: that round.

    data: digest of each split, {} if an older version wrote the checkpoint.
    """

    folder: Path
    recipe: Recipe
    task: Task
    backbone: Backbone
    model: PeftModel | PreTrainedModel
    round: int
    data: dict[str, str]
    trained: TrainedOn

    def card(self, *, merged: bool = False) -> str:
        """The model card of an adapter folder, or of a folder with the merged model."""
        return model_card(self.recipe, self.backbone, self.task, self.trained, merged=merged)


def load_trained(folder: str | Path, round: int | None = None) -> TrainedRun:
    """Loads the base model with a run's trained adapter and head, or with all its trained weights. It needs no data.

    The run may be unfinished.

    round: a round whose checkpoint is still there; None for the newest intact checkpoint.
    Raises UserError if `folder` is not a run with such a checkpoint, or the base is not what it was.
    """
    folder = Path(folder).expanduser()
    require_rounds(folder, round)
    recipe = load_recipe(folder / "recipe.yaml")
    snapshot = snapshot_of(folder, round)
    classes = snapshot.facts.labels
    if classes is None:  # an older checkpoint, without labels: they come from the data
        classes = list(load_dataset(recipe.data, recipe.run.local_hub).classes)
    task = task_of(recipe.data, classes)
    with stage(f"loading {recipe.model.name}"):
        backbone = load_backbone(recipe.model, task.head, local_hub=recipe.run.local_hub, seed=recipe.run.seed)
        keep_template(recipe.data.template, backbone.tokenizer)
        model = trainable(backbone, recipe, recipe.run.seed)
    space = ParameterSpace.of(model)
    if len(snapshot.x) != space.dim:
        raise UserError(
            f"{folder}: its checkpoint has {len(snapshot.x):,} trainable values, but {recipe.model.name} as "
            f"the run trains it has {space.dim:,}: the model is not what it was"
        )
    space.scatter(model, snapshot.x)
    if snapshot.buffers is not None:
        write_statistics(model, snapshot.buffers)
    data = snapshot.facts.data
    about = TrainedOn(snapshot.metrics, data, _clients(folder, recipe), space.dim)
    return TrainedRun(folder, recipe, task, backbone, model, snapshot.round, data, about)


def snapshot_of(folder: Path, round: int | None = None) -> Snapshot:
    """A run's newest intact checkpoint, or that of a round. Raises UserError if there is none."""
    checkpoints = Checkpoints(folder / "checkpoints", warn)
    snapshot = checkpoints.latest() if round is None else checkpoints.of(round)
    if snapshot is None:
        which = "no whole checkpoint" if round is None else f"no whole checkpoint of round {round}"
        raise UserError(f"{folder}: has {which}; start its run again, which goes on from what is intact")
    return snapshot


def _clients(folder: Path, recipe: Recipe) -> int | None:
    """The number of clients, from partition.json; older runs have the recipe's alone."""
    try:
        return len(json.loads((folder / "partition.json").read_text(encoding="utf-8"))["sizes"])
    except (OSError, ValueError, TypeError, KeyError):
        return recipe.partition.known_clients
