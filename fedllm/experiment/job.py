"""A recipe and all objects built from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from peft import PeftModel
from transformers import PreTrainedModel

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.product_gap import MOST_VALUES, Product
from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import RoundInfo
from fedllm.config.recipe import Recipe
from fedllm.data.conversations.options import Options
from fedllm.data.loading import Dataset
from fedllm.data.partition_file import digest
from fedllm.data.pixels import Pixels
from fedllm.data.samples import Samples
from fedllm.data.tokenization import Tokens
from fedllm.experiment.client_guarantee import ClientGuarantee
from fedllm.experiment.guarantee import Guarantee
from fedllm.experiment.machine import Machine
from fedllm.experiment.own_parts import OwnParts
from fedllm.experiment.recipe_data import template_digest
from fedllm.experiment.sample_guarantee import SampleGuarantee
from fedllm.experiment.sample_privacy import private_problem
from fedllm.federation.setup import Setup
from fedllm.federation.turns import make_turns
from fedllm.models.all_weights import start_digest
from fedllm.models.fingerprint import fingerprint
from fedllm.models.loading import Backbone
from fedllm.models.lora import lora_products, lora_turns
from fedllm.problems import checks
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.base import Task


@dataclass(frozen=True)
class Job:
    """A recipe and all objects built from it, ready for the first step.

    recipe: with the model.head that was chosen, where it was "auto", and the data.image_size, where it was null.
    parts: the training samples of the clients that train, without those that they hold out. options: those of the
    validation split's multiple-choice questions, if it has any. own: the clients' own samples, if they are evaluated.
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
    own: OwnParts | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen for the user while the data and the model were read."""
        return (*self.dataset.notes, f"head: {self.backbone.start}", *self.backbone.notes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely not as the user wants it, in the data and in the recipe."""
        private = () if self.guarantee is None else self.guarantee.warnings()
        own = () if self.own is None or self.recipe.eval.per_client is None else self.own.warnings
        return (*self.dataset.warnings, *private, *own)

    @cached_property
    def last_round(self) -> int:
        """The round with which the run ends: that of federation.rounds, or the last within privacy.epsilon."""
        return self.info.total if self.guarantee is None else self.guarantee.last_round()

    @cached_property
    def guarantee(self) -> Guarantee | None:
        """What the section `privacy` guarantees; None without it."""
        if (privacy := self.recipe.privacy) is None:
            return None
        return (ClientGuarantee if privacy.level == "client" else SampleGuarantee)(self, privacy)

    @cached_property
    def setup(self) -> Setup:
        """The objects that every round uses."""
        recipe, sets = self.recipe, lora_turns(self.problem.space) if self.info.turns > 1 else []
        turns = make_turns(sets, self.info.blocks) if sets else ()
        pipeline = Pipeline.of(recipe.uploads, self.algorithm, recipe.run.seed, recipe.robust, recipe.privacy)
        problem = private_problem(recipe, self.problem, self.parts)
        return Setup(self.algorithm, problem, self.info, pipeline, recipe.downloads, turns)

    @property
    def products(self) -> tuple[Product, ...]:
        """The products B A whose `lora_gap` is measured; () without adapters, and where the updates of a round's
        clients are too large to be held together."""
        if self.recipe.lora is None or "d" not in self.algorithm.uploads():
            return ()
        if self.info.sampled * self.problem.dim > MOST_VALUES:
            return ()
        return lora_products(self.problem.space)

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
