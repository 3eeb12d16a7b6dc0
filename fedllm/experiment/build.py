"""Builds everything that a recipe's run needs: device, data, task, model, partition, algorithm, problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from fedllm.common.console import say, stage
from fedllm.common.errors import UserError
from fedllm.common.hub import local_hub
from fedllm.config.recipe import FREE_KEYS, Recipe
from fedllm.data.client_batches import ClientBatches
from fedllm.data.conversations.templates import keep_template
from fedllm.data.loading import Dataset
from fedllm.data.partition_file import left_out_notes
from fedllm.data.samples import Samples
from fedllm.experiment.build_checks import check_evaluation, check_length
from fedllm.experiment.build_problem import build_problem, clients_together
from fedllm.experiment.job import Job
from fedllm.experiment.machine import Machine, find_machine
from fedllm.experiment.own_parts import divide, require_all_here
from fedllm.experiment.parties import EveryClient, Party
from fedllm.experiment.privacy import settle
from fedllm.experiment.recipe_data import grouped_by, settle_samples
from fedllm.experiment.sample_privacy import settle_samples_privacy
from fedllm.federation.executor import Executor
from fedllm.federation.info import round_info
from fedllm.models.all_weights import train_all
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora
from fedllm.tasks.base import Task
from fedllm.tasks.loss_settings import PLAIN
from fedllm.tasks.selection import task_of

T = TypeVar("T")


class ReadCache:
    """A cache of the data and tokens that the last recipe read. The recipes of a sweep share it."""

    def __init__(self) -> None:
        self._results: dict[str, tuple[object, Any]] = {}

    def get(self, kind: str, source: object, read: Callable[[], T]) -> T:
        """The result of `read`, cached while `source` stays equal. The cache holds one result per kind."""
        if kind not in self._results or self._results[kind][0] != source:
            self._results[kind] = (source, read())
        result: T = self._results[kind][1]
        return result


def assemble(recipe: Recipe, cache: ReadCache | None = None, processes: int = 1, party: Party | None = None) -> Job:
    """Loads and builds everything a recipe names, up to its first step.

    cache: data shared with other recipes. processes: the number of processes that share the work. party: whose job it
    is, by default that of a run which trains all clients.
    Raises UserError if parts of the recipe do not fit together.
    """
    cache, party = cache or ReadCache(), party or EveryClient()
    machine = find_machine(recipe, processes)
    algorithm = recipe.load_algorithm()
    hub = recipe.run.local_hub
    local_hub(hub)
    with stage(f"reading {party.source(recipe)}") as progress:
        dataset = cache.get("dataset", _data_source(recipe), lambda: party.read(recipe, progress))
    recipe = replace(recipe, data=replace(recipe.data, image_size=dataset.image_size))
    task = task_of(recipe.data, dataset.classes)
    check_evaluation(recipe, task, dataset)
    parts = party.parts(recipe, dataset)
    if party.trains_all:
        told = left_out_notes(recipe.partition, dataset, parts)
        dataset = replace(dataset, notes=(*dataset.notes, *told))
    require_all_here(recipe, party)
    count = len(parts) - recipe.federation.clients_held_out(len(parts))
    recipe = settle(recipe.for_clients(count), count)
    backbone, model = _load_model(recipe, task, machine)
    recipe = replace(recipe, model=replace(recipe.model, head=backbone.start.setting))
    tokens = _tokenize(recipe, dataset, task, backbone, cache)
    dataset, parts, train, validation = settle_samples(dataset, parts, tokens)
    party.require_samples(parts, recipe)
    parts, unseen, own = divide(recipe, dataset, parts, train)
    if recipe.loss != PLAIN:
        task.set_loss(recipe.loss, task.class_counts(dataset.train, parts) if party.trains_all else None)
    recipe = settle_samples_privacy(recipe, parts)
    local = recipe.local
    epochs = 1 if local.epochs is None and local.steps is None else local.epochs
    tuned = [] if local.finetune_steps is None else unseen
    given = [*parts, *tuned]
    batches = ClientBatches(given, batch_size=local.batch_size, epochs=epochs, steps=local.steps, seed=recipe.run.seed)
    problem = build_problem(recipe, machine, algorithm, task, backbone, model, train, batches)
    problem.num_clients = len(parts)
    if algorithm.contrastive:
        problem.find_representations()  # a model without them is told of before the first round
    assert recipe.federation.clients_per_round is not None
    info = round_info(
        algorithm,
        problem,
        rounds=recipe.federation.rounds,
        sampled=recipe.federation.clients_per_round,
        tracked=recipe.federation.tracked_per_round,
        local_steps=max(batches.steps(client) for client in range(len(parts))),
        turns=2 if recipe.takes_turns else 1,
    )
    stacked = clients_together(recipe, algorithm, problem, info, machine) if party.trains_all else 1
    options = task.options(dataset.validation, backbone.tokenizer, recipe.data.max_length)
    job = Job(
        recipe, machine, dataset, task, backbone, model, parts, validation, algorithm, problem, info, stacked, options,
        own,
    )  # fmt: skip
    job.setup.require_private()
    return job


def _load_model(recipe: Recipe, task: Task, machine: Machine) -> tuple[Backbone, PeftModel | PreTrainedModel]:
    """The base with the task's head, and the same model on the machine's device, ready for training."""
    seed = recipe.run.seed
    with stage(f"loading {recipe.model.name}", at_once=True):
        backbone = load_backbone(recipe.model, task.head, local_hub=recipe.run.local_hub, seed=seed)
        keep_template(recipe.data.template, backbone.tokenizer)
        model = trainable(backbone, recipe, seed)
        nn.Module.to(model, machine.device)
    check_length(recipe, backbone)
    return backbone, model


def trainable(backbone: Backbone, recipe: Recipe, seed: int) -> PeftModel | PreTrainedModel:
    """The backbone's model with the recipe's adapters, or with all weights trainable."""
    if recipe.lora is None:
        return train_all(backbone, recipe.model, seed=seed)
    return attach_lora(backbone, recipe.lora, seed=seed)


def _tokenize(recipe: Recipe, dataset: Dataset, task: Task, backbone: Backbone, cache: ReadCache) -> list[Samples]:
    """The tokens, or images, of the training and of the validation samples."""
    splits, length = (dataset.train, dataset.validation), recipe.data.max_length
    with stage("tokenizing") as progress:
        return cache.get(
            "tokens",
            (*_data_source(recipe), recipe.model.name),
            lambda: [task.encode(split, backbone.encoder, length, progress) for split in splits],
        )


def _data_source(recipe: Recipe) -> tuple[Any, ...]:
    """What the samples of a recipe depend on."""
    return recipe.data, recipe.run.local_hub, grouped_by(recipe)


def build_together(recipe: Recipe, cache: ReadCache | None, executor: Executor) -> Job:
    """Calls `assemble` in every process. Raises UserError if the processes read different data or weights."""

    def work() -> tuple[Job, dict[str, str]]:
        job = assemble(recipe, cache, executor.size)
        if executor.size == 1:
            return job, {}
        return job, job.data | {"base model": job.weights_digest(), "recipe": _digest(recipe)}

    job, digests = executor.together(work, lambda rank: "preparing the run")
    for rank, found in enumerate(digests):
        if other := [name for name, digest in digests[0].items() if found[name] != digest]:
            raise UserError(
                f"process {rank} read other data than process 0 (it differs in: {', '.join(other)}); every machine "
                f"must find the same files under the names in the recipe"
            )
    return job


def _digest(recipe: Recipe) -> str:
    """sha256 of the settings that change a run's numbers."""
    sections = {
        section: {key: value for key, value in values.items() if (section, key) not in FREE_KEYS}
        for section, values in recipe.sections().items()
    }
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def say_notes(recipe: Recipe) -> None:
    """Prints what the user should know of how the recipe came about."""
    for note in recipe.notes:
        say(note, "dim")


def run_folder(recipe: Recipe) -> Path:
    """The run folder of a recipe: run.dir, or runs/<recipe>-s<seed>."""
    return Path(recipe.run.dir or f"runs/{recipe.name}-s{recipe.run.seed}").expanduser()


def with_dir(recipe: Recipe, folder: str | Path | None) -> Recipe:
    """The recipe, with run.dir set to `folder` if one is given."""
    return recipe if folder is None else replace(recipe, run=replace(recipe.run, dir=str(folder)))
