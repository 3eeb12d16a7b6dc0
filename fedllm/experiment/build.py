"""Builds everything that a recipe's run needs: device, data, task, model, partition, algorithm, problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from fedllm.aggregation.pipeline import Pipeline
from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import RoundInfo
from fedllm.blocks import RoleError
from fedllm.blocks import partition as block_partition
from fedllm.common.console import say, stage
from fedllm.common.errors import UserError
from fedllm.common.hub import local_hub
from fedllm.common.schema import nearest
from fedllm.config.own_files import require_own_files
from fedllm.config.recipe import FREE_KEYS, Recipe
from fedllm.data.client_batches import ClientBatches
from fedllm.data.conversations.options import Options
from fedllm.data.conversations.templates import keep_template
from fedllm.data.loading import Dataset
from fedllm.data.partition_file import digest, get_partition
from fedllm.data.pixels import Pixels
from fedllm.data.samples import Samples
from fedllm.data.tokenization import Tokens
from fedllm.experiment.full_memory import FullNeed, full_pass_bytes, require_memory
from fedllm.experiment.machine import Machine, find_machine
from fedllm.experiment.memory_plan import choose_stacked_clients, pass_bytes
from fedllm.experiment.recipe_data import grouped_by, read_data, require_samples, settle_samples, template_digest
from fedllm.federation.executor import Executor
from fedllm.federation.info import round_info
from fedllm.federation.setup import Setup
from fedllm.models.all_weights import start_digest, train_all
from fedllm.models.fingerprint import fingerprint
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora
from fedllm.problems import checks
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.full.settings import FullSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.base import LOSS, Task
from fedllm.tasks.selection import task_of

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A recipe and all objects built from it, ready for the first step.

    recipe: with the model.head that was chosen, where it was "auto", and the data.image_size, where it was null.
    options: those of the validation split's multiple-choice questions, if it has any.
    """

    recipe: Recipe
    machine: Machine
    dataset: Dataset
    task: Task
    backbone: Backbone
    model: PeftModel | PreTrainedModel
    parts: list[np.ndarray]
    validation: Samples
    algorithm: Algorithm
    problem: LoraProblem | FullProblem
    info: RoundInfo
    stacked_clients: int
    options: Options | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen for the user while the data and the model were read."""
        return (*self.dataset.notes, f"head: {self.backbone.start}", *self.backbone.notes)

    @property
    def setup(self) -> Setup:
        """The objects that every round uses."""
        pipeline = Pipeline.of(self.recipe.uploads, self.algorithm, self.recipe.run.seed)
        return Setup(self.algorithm, self.problem, self.info, pipeline)

    @property
    def equal_steps(self) -> bool:
        """Whether all clients take the same number of local steps."""
        counts = checks.steps(self.problem, range(self.info.num_clients), 0)
        return counts is None or {*counts} == {self.info.local_steps}

    @cached_property
    def data(self) -> dict[str, str]:
        """Digests of a result's inputs other than the recipe: training split, validation split, partition, and the
        file of a chat template."""
        validation = self.dataset.validation.fingerprint()
        found = {"training": self.dataset.fingerprint, "validation": validation, "partition": digest(self.parts)}
        return found | template_digest(self.recipe)

    def weights_digest(self) -> str:
        """A digest of the weights that must be equal in all processes: frozen ones, or the start of trained ones."""
        found = fingerprint(self.model)
        return found if self.recipe.lora is not None else found + start_digest(self.problem.initial())

    def base_digest(self) -> str:
        """A digest of the base model, and of what it reads of the data: tokens, or images as they are normalised."""
        found = hashlib.sha256(self.weights_digest().encode())
        for tokens in (self.problem.samples, self.validation):
            if isinstance(tokens, Tokens):
                found.update(tokens.input_ids.cpu().numpy().tobytes())
                found.update(tokens.offsets.cpu().numpy().tobytes())
                if tokens.learned is not None:
                    found.update(tokens.learned.cpu().numpy().tobytes())
            elif isinstance(tokens, Pixels):
                found.update(tokens.fingerprint())
        return found.hexdigest()


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


def assemble(recipe: Recipe, cache: ReadCache | None = None, processes: int = 1) -> Job:
    """Loads and builds everything a recipe names, up to its first step.

    cache: data shared with other recipes. processes: the number of processes that share the work.
    Raises UserError if parts of the recipe do not fit together.
    """
    cache = cache or ReadCache()
    machine = find_machine(recipe, processes)
    algorithm = recipe.load_algorithm()
    hub = recipe.run.local_hub
    local_hub(hub)
    require_own_files(recipe)
    with stage(f"reading {recipe.data.name or recipe.data.train}") as progress:
        dataset = cache.get("dataset", _data_source(recipe), lambda: read_data(recipe, progress))
    recipe = replace(recipe, data=replace(recipe.data, image_size=dataset.image_size))
    task = task_of(recipe.data, dataset.classes)
    _check_evaluation(recipe, task, dataset)
    parts = get_partition(recipe.partition, dataset)
    _check_parts(parts, recipe)
    recipe = recipe.for_clients(len(parts))
    backbone, model = _load_model(recipe, task, machine)
    recipe = replace(recipe, model=replace(recipe.model, head=backbone.start.setting))
    tokens = _tokenize(recipe, dataset, task, backbone, cache)
    dataset, parts, train, validation = settle_samples(dataset, parts, tokens)
    require_samples(parts, recipe)
    local = recipe.local
    epochs = 1 if local.epochs is None and local.steps is None else local.epochs
    batches = ClientBatches(parts, batch_size=local.batch_size, epochs=epochs, steps=local.steps, seed=recipe.run.seed)
    blocks = _blocks(model, algorithm, recipe, machine)
    given = (model, train, batches, task.losses)
    problem: LoraProblem | FullProblem
    if recipe.lora is None:
        problem = FullProblem(*given, _full_settings(recipe, machine, backbone), blocks)
    else:
        problem = LoraProblem(*given, _engine_settings(recipe, machine, backbone), blocks)
    assert recipe.federation.clients_per_round is not None
    info = round_info(
        algorithm,
        problem,
        rounds=recipe.federation.rounds,
        sampled=recipe.federation.clients_per_round,
        tracked=recipe.federation.tracked_per_round,
        local_steps=max(batches.steps(client) for client in range(len(parts))),
    )
    stacked = _stacked_clients(recipe, algorithm, problem, info, machine)
    options = task.options(dataset.validation, backbone.tokenizer, recipe.data.max_length)
    return Job(
        recipe, machine, dataset, task, backbone, model, parts, validation, algorithm, problem, info, stacked, options
    )


def _stacked_clients(
    recipe: Recipe, algorithm: Algorithm, problem: LoraProblem | FullProblem, info: RoundInfo, machine: Machine
) -> int:
    """How many clients are trained together: with all weights one, unless the recipe says more.

    Raises UserError where training all weights does not fit into memory.
    """
    wanted = recipe.run.stacked_clients
    if isinstance(problem, LoraProblem):
        return choose_stacked_clients(wanted, algorithm, problem, info, machine.device)
    together = 1 if wanted == "auto" else min(wanted, info.sampled)
    require_memory(FullNeed.of(algorithm, problem, info, together), machine.device, recipe.algorithm["name"])
    return together


def _load_model(recipe: Recipe, task: Task, machine: Machine) -> tuple[Backbone, PeftModel | PreTrainedModel]:
    """The base with the task's head, and the same model on the machine's device, ready for training."""
    seed = recipe.run.seed
    with stage(f"loading {recipe.model.name}", at_once=True):
        backbone = load_backbone(recipe.model, task.head, local_hub=recipe.run.local_hub, seed=seed)
        keep_template(recipe.data.template, backbone.tokenizer)
        model = trainable(backbone, recipe, seed)
        nn.Module.to(model, machine.device)
    _check_length(recipe, backbone)
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


def _engine_settings(recipe: Recipe, machine: Machine, backbone: Backbone) -> EngineSettings:
    return EngineSettings(
        autocast=machine.autocast,
        slices=None if recipe.run.slices == "auto" else recipe.run.slices,
        pass_bytes=pass_bytes(machine.device),
        checkpointing=recipe.run.gradient_checkpointing,
        pad_id=backbone.pad_id,
    )


def _full_settings(recipe: Recipe, machine: Machine, backbone: Backbone) -> FullSettings:
    return FullSettings(
        autocast=machine.autocast,
        pass_bytes=full_pass_bytes(machine.device),
        pad_id=backbone.pad_id,
        stacked=recipe.run.stacked_clients not in ("auto", 1),
        local_buffers=recipe.model.norm == "local",
    )


def _blocks(model: PeftModel | PreTrainedModel, algorithm: Algorithm, recipe: Recipe, machine: Machine) -> Any:
    """The block partition, for algorithms that send block means."""
    if not algorithm.needs_blocks():
        return None
    try:
        blocks = block_partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(f"model.name={recipe.model.name}: {error}; or set algorithm.blocks=tensor") from error
    return blocks.to(machine.device)


def _check_evaluation(recipe: Recipe, task: Task, dataset: Dataset) -> None:
    settings, columns = recipe.eval, list(dataset.validation.columns)
    if settings.by is not None and settings.by not in columns:
        raise UserError(
            f"eval.by: found '{settings.by}'{nearest(settings.by, columns)}, expected a column of the validation "
            f"split: {', '.join(columns) or 'it has none beside the samples and their labels'}"
        )
    if settings.samples and not task.generates:
        raise UserError(
            f"eval.samples: found {settings.samples}, but only a language model answers prompts; leave it out for "
            f"{dataset.name}"
        )
    known = (*task.metric_names, LOSS)
    for name in settings.target or {}:
        if name not in known:
            raise UserError(
                f"eval.target: found metric '{name}', expected one of {', '.join(known)} for {dataset.name}"
            )


def _check_parts(parts: list[np.ndarray], recipe: Recipe) -> None:
    source = recipe.partition.file or f"partition.scheme={recipe.partition.scheme}"
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(f"{source}: client {client} has no samples; set partition.min_size to 1 or more")


def _check_length(recipe: Recipe, backbone: Backbone) -> None:
    limit = backbone.max_length
    if limit is not None and recipe.data.max_length > limit:
        raise UserError(
            f"data.max_length: found {recipe.data.max_length}, but {recipe.model.name} has {limit} positions"
        )


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
