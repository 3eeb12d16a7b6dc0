"""The scores of each class, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.metrics import roc_auc_score
from torch import Tensor
from typing_extensions import TypedDict

from fedllm.tasks.metrics import NO_ANSWER


class ClassScores(TypedDict):
    """Scores by class, in the order of `names`. A score is None for a class without samples, a precision also for one
    that is never predicted, and an AUROC also where all samples are of one class or a probability is not a number.

    samples: of each class. auroc: of a class against all others; two classes have the same. balanced_accuracy,
    macro_auroc: the means of recall and auroc over the classes that have one. confusion[i][j]: samples of class i that
    are predicted as j. no_answer: samples of each class whose outputs are not numbers, which count as wrong.
    """

    names: list[str]
    samples: list[int]
    recall: list[float | None]
    precision: list[float | None]
    auroc: list[float | None]
    balanced_accuracy: float | None
    macro_auroc: float | None
    confusion: list[list[int]]
    no_answer: list[int]


def class_scores(names: Sequence[str], predicted: np.ndarray, probabilities: Tensor, labels: np.ndarray) -> ClassScores:
    """The scores of n samples. predicted: ids [n] or NO_ANSWER. probabilities: [n, C]. labels: ids [n]."""
    count = len(names)
    answered = predicted != NO_ANSWER
    confusion = np.zeros((count, count), np.int64)
    np.add.at(confusion, (labels[answered], predicted[answered]), 1)
    samples = np.bincount(labels, minlength=count)
    recall = [_share(confusion[c, c], samples[c]) for c in range(count)]
    auroc = _auroc(probabilities.double().cpu().numpy(), labels)
    return ClassScores(
        names=list(names),
        samples=samples.tolist(),
        recall=recall,
        precision=[_share(confusion[c, c], confusion[:, c].sum()) if samples[c] else None for c in range(count)],
        auroc=auroc,
        balanced_accuracy=_mean(recall),
        macro_auroc=_mean(auroc),
        confusion=confusion.tolist(),
        no_answer=(samples - confusion.sum(axis=1)).tolist(),
    )


def _auroc(probabilities: np.ndarray, labels: np.ndarray) -> list[float | None]:
    if not np.isfinite(probabilities).all():
        return [None] * probabilities.shape[1]
    found: list[float | None] = []
    for c in range(probabilities.shape[1]):
        own = labels == c
        found.append(float(roc_auc_score(own, probabilities[:, c])) if own.any() and not own.all() else None)
    return found


def _share(part: int, whole: int) -> float | None:
    return float(part / whole) if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
