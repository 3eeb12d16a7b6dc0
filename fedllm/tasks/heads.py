"""The heads that tasks put on a base model, in the words of transformers and PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedllm.common.errors import UserError


@dataclass(frozen=True)
class Head:
    """Which head a model gets.

    auto_class: the name of the transformers class that loads a base model with this head. task_type: PEFT's name of
    this kind of head, which adapter_config.json repeats; None for a kind that PEFT has no name for. config: keys of the
    model's config; they replace those of the checkpoint, which may be of another task. classes: the names of the
    outputs in their order; () if outputs are no classes, so that their names do not say which is which. image_size: the
    side of the images of a model that is built by name (models.image_models), None for texts.
    """

    auto_class: str
    task_type: str | None
    config: dict[str, Any]
    classes: tuple[str, ...] = ()
    image_size: int | None = None


def language_head() -> Head:
    """The output embedding of a causal language model: a logit per word of the vocabulary. It is not trained."""
    return Head("AutoModelForCausalLM", "CAUSAL_LM", {})


def sequence_head(num_labels: int, *, regression: bool = False, label_names: Sequence[str] | None = None) -> Head:
    """A head that gives `num_labels` outputs per sample: one per class, or the one value of a regression.

    label_names: of the classes in the order of their ids, by default LABEL_0, LABEL_1, ... as in transformers.
    Raises UserError: no output, a regression with several, another number of names than of outputs.
    """
    if num_labels < 1:
        raise UserError(f"the task has {num_labels} labels, expected at least 1")
    if regression and num_labels != 1:
        raise UserError(f"a regression task has 1 output, found num_labels={num_labels}")
    if label_names is not None and len(label_names) != num_labels:
        raise UserError(f"found label names {list(label_names)}, expected {num_labels} of them")
    names = label_names or [f"LABEL_{i}" for i in range(num_labels)]
    config = {
        "num_labels": num_labels,
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": "regression" if regression else "single_label_classification",
    }
    return Head("AutoModelForSequenceClassification", "SEQ_CLS", config, () if regression else tuple(names))


def image_head(label_names: Sequence[str], image_size: int) -> Head:
    """A head that gives one output per class of images. label_names: the classes in the order of their ids.

    Raises UserError if there is no class.
    """
    head = sequence_head(len(label_names), label_names=label_names)
    return replace(head, auto_class="AutoModelForImageClassification", task_type=None, image_size=image_size)
