"""What a model is trained for: its head, its samples, its loss and its scores.

Outside this room, outputs and targets are tensors with one row per sample, which only a task reads.

Of a causal language model the outputs are four sums per sample [n, 4], over the tokens to learn (see causal_lm): the
problems compute them, so that no task ever has the logits of all tokens. Of images, `encode` gives pixels in place of
tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedllm.common.console import ProgressCallback
    from fedllm.data.conversations.options import Options
    from fedllm.data.loading import Split
    from fedllm.data.samples import Samples
    from fedllm.tasks.class_scores import ClassScores
    from fedllm.tasks.heads import Head
    from fedllm.tasks.loss_settings import LossSettings

LOSS = "eval_loss"  # the name of an evaluation's loss, beside a task's scores
PERPLEXITY = "perplexity"


def lower_is_better(name: str) -> bool:
    """Whether the lowest value of a score is the best one. Reports know a score by its name alone."""
    return name in (LOSS, PERPLEXITY)


def require_reachable(target: Mapping[str, float]) -> None:
    """Raises UserError, naming the first metric that no model can bring to its target: a score above 1, a loss below
    0, a perplexity below 1."""
    for name, value in target.items():
        least = 1 if name == PERPLEXITY else 0
        limit = f"at least {least}, its least value" if lower_is_better(name) else "at most 1, where every metric ends"
        if value < least if lower_is_better(name) else value > 1:
            raise UserError(f"target: found {name}: {value:g}, expected {limit}")


class Task(ABC):
    """What a model is trained for; `selection.task_of` makes the one that a recipe's data ask for.

    head: which head the model gets. metric_names: the scores that `evaluate` gives beside the loss, the headline first.
    classes: the names of the classes in the order of their ids, () where targets are no classes. generates: whether the
    model writes text.
    """

    head: Head
    metric_names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    generates: bool = False

    @property
    def primary(self) -> str:
        """The name of the headline score."""
        return self.metric_names[0]

    @abstractmethod
    def describe(self) -> str:
        """The kind of the targets in a few words, for the plan: "5 classes", "a regression"."""

    @abstractmethod
    def encode(self, split: Split, encoder: Any, max_length: int, progress: ProgressCallback | None = None) -> Samples:
        """The n samples of a split as a model reads them, with their targets.

        encoder: what the model says of its input (Backbone.encoder): a tokenizer, with which each text is cut to
        `max_length` tokens, or an ImageFormat. Raises UserError for a length or a tokenizer that the samples cannot be
        encoded with.
        """

    def options(self, split: Split, tokenizer: Any, max_length: int) -> Options | None:
        """The options of the split's multiple-choice questions as samples; None without such questions."""
        return None

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [n], differentiable in the outputs [n, L] of the model's head; targets [n]."""

    def set_loss(self, settings: LossSettings, counts: Sequence[Sequence[int]] | None) -> None:
        """Takes the loss of local steps that `settings` ask for; raises UserError where a task has no choice.

        counts: see class_counts, of all clients; None where their samples are not here.
        """
        raise UserError(f"loss: found settings, but the loss of {self.describe()} has none; leave the section out")

    @abstractmethod
    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The mean loss, named LOSS, and then `metric_names` of n samples: outputs [n, L], targets [n], on the CPU."""

    def evaluate_parts(self, outputs: Tensor, targets: Tensor, parts: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """What `evaluate` gives for each of several parts of the n samples, as indices."""
        return [self.evaluate(outputs[part], targets[part]) for part in parts]

    def by_class(self, outputs: Tensor, targets: Tensor) -> ClassScores | None:
        """The scores of each class, and the confusion matrix, of n samples; None where targets are no classes."""
        return None

    def choose(self, outputs: Tensor, options: Options) -> dict[str, float]:
        """The scores of multiple-choice questions, by the outputs [n, L] of their n options."""
        return {}

    @abstractmethod
    def predictions(self, outputs: Tensor) -> list[Any]:
        """What each of n samples is: the name of a class, or a number; None where its outputs [L] are not numbers.

        outputs: [n, L], on the CPU.
        """

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        """The probability of each class [n, C], for outputs [n, L]; None where a task has no classes."""
        return None

    def class_counts(self, split: Split, parts: Sequence[np.ndarray]) -> list[list[int]] | None:
        """How many samples of each class each of N clients has, [N, classes]; None where targets are no classes.

        parts: the indices into `split` of each client's samples.
        """
        return None
