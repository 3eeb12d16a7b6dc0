"""Outputs of a run's trained model for new samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.common.tensors import shortest
from fedllm.data.known_images import reads_images
from fedllm.data.loading import Split
from fedllm.data.samples import Samples
from fedllm.data.tokenization import Tokens
from fedllm.experiment.machine import Machine, find_machine
from fedllm.experiment.recipe_data import without_left_out
from fedllm.experiment.trained import TrainedRun
from fedllm.models.quantization import lower, settle
from fedllm.problems.full.batch_reader import BatchReader
from fedllm.problems.lora.evaluation_batches import evaluate, evaluation_batches
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.readout import readout_of

_BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}  # of a batch, with padding; halved where memory gives out


@dataclass(frozen=True)
class Predictions:
    """What a model says of n samples. values [n]: names of classes, or numbers; None where its outputs are not numbers.

    probabilities [n, C]: of each class, in the order of `classes`; None if there are no classes.
    """

    values: list[str | float | None]
    classes: tuple[str, ...]
    probabilities: Tensor | None

    def probability(self, index: int) -> list[float | None]:
        """The probability of one class, for each sample [n]."""
        assert self.probabilities is not None, "only classes have probabilities"
        return [shortest(value) for value in self.probabilities[:, index].tolist()]


class Inference:
    """A run's trained model, ready on this machine: its GPU if it has one, in the precision of the run.

    The model computes in eval mode; other samples of a batch change the outputs by rounding only.
    """

    def __init__(self, run: TrainedRun) -> None:
        self.run = run
        self.machine = _machine(run)
        settle(run.model.eval(), self.machine.autocast)
        lower(run.model, self.machine.autocast)
        nn.Module.to(run.model, self.machine.device)
        self._cuts = 1

    def precision(self) -> AbstractContextManager[Any]:
        """A context in which the model computes in the precision of the run."""
        autocast = self.machine.autocast
        return nullcontext() if autocast is None else torch.autocast(self.machine.device.type, dtype=autocast)

    @torch.no_grad()
    def outputs(self, tokens: Samples) -> Tensor:
        """Outputs [n, L] of the head, or sums over the learned tokens of a sample (see Readout), float32 on the CPU.

        Raises RunError where a sample alone does not fit.
        """
        lengths = tokens.lengths.numpy()
        device, model = self.machine.device, self.run.model
        reader = BatchReader(tokens, self.run.backbone.pad_id)
        readout = readout_of(model, tokens)

        def outputs_of(index: Tensor) -> Tensor:
            inputs = reader.read(index.numpy(), device).inputs
            learned = None
            if isinstance(tokens, Tokens):
                begin = np.arange(len(index)) * inputs["input_ids"].shape[1]
                learned = LearnedTokens.within(tokens, index.numpy(), begin)
            with self.precision():
                return readout.outputs(inputs, learned and learned.to(device)).cpu()

        batches = evaluation_batches(lengths, _BATCH_TOKENS[device.type])
        found, self._cuts = evaluate(outputs_of, lengths, batches, self._cuts)
        return found

    def tokens(self, split: Split, progress: ProgressCallback | None = None) -> Samples:
        """The samples as the run's own samples were encoded, without those that the task left out."""
        recipe = self.run.recipe
        samples = self.run.task.encode(split, self.run.backbone.encoder, recipe.data.max_length, progress)
        return without_left_out(samples)

    def predict(self, *texts: Sequence[str]) -> Predictions:
        """Predictions for n samples. texts: one column of n texts, or two if the run was trained on pairs.

        Raises UserError for a run on images.
        """
        if reads_images(self.run.recipe.data):
            raise UserError(f"{self.run.folder}: found texts, expected images: the run was trained on images")
        return self._predicted(Split([list(column) for column in texts], np.zeros(len(texts[0]), np.int64), {}))

    def predict_images(self, images: np.ndarray) -> Predictions:
        """Predictions for n images: uint8 [n, 3, S, S] in red, green and blue, S = the run's data.image_size.

        Raises UserError for other arrays, and for a run on texts.
        """
        size = self.run.recipe.data.image_size
        if not reads_images(self.run.recipe.data):
            raise UserError(f"{self.run.folder}: found images, expected texts: the run was trained on texts")
        if images.dtype != np.uint8 or images.shape[1:] != (3, size, size):
            raise UserError(
                f"images: found an array {images.dtype} {list(images.shape)}, expected uint8 [n, 3, {size}, {size}]"
            )
        return self._predicted(Split([], np.zeros(len(images), np.int64), {}, images=images))

    def _predicted(self, split: Split) -> Predictions:
        outputs = self.outputs(self.tokens(split))
        task = self.run.task
        return Predictions(task.predictions(outputs), task.classes, task.probabilities(outputs))


def _machine(run: TrainedRun) -> Machine:
    """This machine, for a run that may have been trained on another one: a GPU is used if there is one."""
    settings = run.recipe.run
    if settings.device == "cuda":
        settings = replace(settings, device="auto")
    return find_machine(replace(run.recipe, run=settings))
