"""Which task a recipe's `data:` section asks for, and with which metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedllm.data.known_datasets import KNOWN_DATASETS
from fedllm.data.known_images import known_images, reads_images
from fedllm.data.settings import CAUSAL_LM
from fedllm.tasks.base import LOSS, Task
from fedllm.tasks.causal_lm import CausalLM
from fedllm.tasks.image_classification import METRIC, ImageClassification
from fedllm.tasks.metrics import METRICS
from fedllm.tasks.sequence_classification import SequenceClassification, SequenceRegression

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

# The metrics of data that are not known by name.
_OF_CLASSES, _OF_NUMBERS = "accuracy_macro_f1", "pearson_spearman"


def task_of(settings: DataSettings, classes: Sequence[str]) -> Task:
    """The task of a data set: a causal language model or a classification of images where `data.task` says so, else a
    classification where its labels are `classes`, in the order of their ids, else a regression. settings.image_size is
    the side of the images that were kept. The metric of a classification or a regression is the official one of a data
    set that is known by name."""
    if settings.task == CAUSAL_LM:
        return CausalLM(settings)
    if reads_images(settings):
        assert settings.image_size is not None, "the images' own size, once they were read"
        images = known_images(settings)
        mean, std = (images.mean, images.std) if images else (None, None)
        return ImageClassification(classes, settings.image_size, mean, std, settings.augment == "standard")
    known = KNOWN_DATASETS.get(settings.name or "")
    if classes:
        return SequenceClassification(classes, known.metric if known else _OF_CLASSES)
    return SequenceRegression(known.metric if known else _OF_NUMBERS)


def score_names(settings: DataSettings) -> list[str]:
    """The scores that an evaluation may give, before the data are read: LOSS last, and of your own data, whose labels
    may be classes or numbers, the metrics of both."""
    if settings.task == CAUSAL_LM:
        return [*CausalLM(settings).metric_names, LOSS]
    if reads_images(settings):
        return [*METRICS[METRIC][0], LOSS]
    known = KNOWN_DATASETS.get(settings.name or "")
    keys = [known.metric] if known else [_OF_CLASSES, _OF_NUMBERS]
    return [*dict.fromkeys(name for key in keys for name in METRICS[key][0]), LOSS]
