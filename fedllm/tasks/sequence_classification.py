"""The class of a sample, and the class, or the value, of a whole text: the tasks with one label per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedllm.common.console import ProgressCallback
from fedllm.common.tensors import shortest
from fedllm.data.loading import Split
from fedllm.data.tokenization import Tokens, tokenize
from fedllm.tasks.base import LOSS, Task
from fedllm.tasks.class_loss import ClassLoss
from fedllm.tasks.class_scores import ClassScores, class_scores
from fedllm.tasks.heads import sequence_head
from fedllm.tasks.loss_settings import LossSettings
from fedllm.tasks.metrics import METRICS, NO_ANSWER, Scores, TaskMetric


class Classification(Task):
    """One of C classes per sample; the loss is the cross-entropy.

    classes: their C names in the order of their ids. metric: a key of metrics.METRICS. loss: that of local steps.

    Outputs are logits [n, C], targets int64 ids [n]. A sample whose logits are not all numbers counts as wrong.
    """

    def __init__(self, classes: Sequence[str], metric: str) -> None:
        self.classes = tuple(classes)
        self.loss = ClassLoss()
        self._metric, self.metric_names = metric, METRICS[metric][0]

    def describe(self) -> str:
        return f"{len(self.classes)} classes"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def set_loss(self, settings: LossSettings, counts: Sequence[Sequence[int]] | None) -> None:
        found = None if counts is None else [sum(of_class) for of_class in zip(*counts, strict=True)]
        self.loss = ClassLoss(settings.weights(self.classes, found), settings.label_smoothing, settings.focal)

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Scores:
        loss = float(F.cross_entropy(outputs, targets))
        return {LOSS: loss, **_scores(self._metric, predicted_classes(outputs), targets)}

    def evaluate_parts(self, outputs: Tensor, targets: Tensor, parts: Sequence[np.ndarray]) -> list[Scores]:
        """The metric's own function gives the same numbers as TaskMetric, without its 15 ms for each part."""
        predicted, labels, score = predicted_classes(outputs), targets.cpu().numpy(), METRICS[self._metric][1]
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return [{LOSS: float(losses[part].mean()), **score(predicted[part], labels[part])} for part in parts]

    def by_class(self, outputs: Tensor, targets: Tensor) -> ClassScores:
        probabilities = F.softmax(outputs.double(), dim=1)
        return class_scores(self.classes, predicted_classes(outputs), probabilities, targets.cpu().numpy())

    def predictions(self, outputs: Tensor) -> list[Any]:
        return [None if index == NO_ANSWER else self.classes[index] for index in predicted_classes(outputs)]

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        return F.softmax(outputs.float(), dim=1)

    def class_counts(self, split: Split, parts: Sequence[np.ndarray]) -> list[list[int]] | None:
        return [np.bincount(split.labels[part], minlength=len(self.classes)).tolist() for part in parts]


class SequenceClassification(Classification):
    """The class of a text or a pair of texts.

    The classifiers of GPT-2, Llama and their like read the last token that is not the pad token and do not look at the
    attention mask. Where pad is eos, an eos that ends a text is therefore never the token read: padding cannot change
    the logits, but such an eos adds nothing.
    """

    def __init__(self, classes: Sequence[str], metric: str) -> None:
        super().__init__(classes, metric)
        self.head = sequence_head(len(self.classes), label_names=self.classes)

    def encode(self, split: Split, encoder: Any, max_length: int, progress: ProgressCallback | None = None) -> Tokens:
        return tokenize(split, encoder, max_length, progress)


class SequenceRegression(Task):
    """One number per text or pair of texts; the loss is the squared error.

    metric: a key of metrics.METRICS. Outputs are values [n, 1], targets float32 [n].
    """

    def __init__(self, metric: str) -> None:
        self.head = sequence_head(1, regression=True)
        self._metric, self.metric_names = metric, METRICS[metric][0]

    def describe(self) -> str:
        return "a regression"

    def encode(self, split: Split, encoder: Any, max_length: int, progress: ProgressCallback | None = None) -> Tokens:
        return tokenize(split, encoder, max_length, progress)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[:, 0], targets.float(), reduction="none")

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Scores:
        loss = float(F.mse_loss(outputs[:, 0], targets.float()))
        return {LOSS: loss, **_scores(self._metric, outputs[:, 0].detach().float().cpu().numpy(), targets)}

    def predictions(self, outputs: Tensor) -> list[Any]:
        return [shortest(value) for value in outputs[:, 0].tolist()]


def predicted_classes(logits: Tensor) -> np.ndarray:
    """The ids, int64 [n], of the largest of the logits [n, C]; NO_ANSWER where one of them is not a number."""
    values = logits.detach().float().cpu().numpy()
    return np.where(np.isnan(values).any(axis=1), NO_ANSWER, values.argmax(axis=1))


def _scores(metric: str, predicted: np.ndarray, targets: Tensor) -> Scores:
    found: Scores = TaskMetric(metric).compute(predictions=predicted, references=targets.cpu().numpy())
    return found
