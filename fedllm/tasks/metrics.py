"""The official metrics by key, as `evaluate` modules that need no network and write nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

Scores = dict[str, float]
NO_ANSWER = -1  # the predicted class where a diverged model's logits are not numbers: wrong, whatever the label


def _accuracy(predicted: np.ndarray, labels: np.ndarray) -> Scores:
    return {"accuracy": float(np.mean(predicted == labels))}


def _accuracy_f1(predicted: np.ndarray, labels: np.ndarray) -> Scores:
    """F1 of the positive class 1; 0 where it is neither predicted nor there."""
    return _accuracy(predicted, labels) | {"f1": float(f1_score(labels == 1, predicted == 1, zero_division=0))}


def _accuracy_macro_f1(predicted: np.ndarray, labels: np.ndarray) -> Scores:
    """F1 averaged over the classes that are predicted or there."""
    classes = np.setdiff1d(np.union1d(predicted, labels), NO_ANSWER)
    f1 = f1_score(labels, predicted, labels=classes, average="macro", zero_division=0)
    return _accuracy(predicted, labels) | {"macro_f1": float(f1)}


def _matthews_correlation(predicted: np.ndarray, labels: np.ndarray) -> Scores:
    """0 where the predictions or the labels are all one class, as in scikit-learn: they tell nothing."""
    constant = len(np.unique(predicted)) < 2 or len(np.unique(labels)) < 2
    return {"matthews_correlation": 0.0 if constant else float(matthews_corrcoef(labels, predicted))}


def _pearson_spearman(predicted: np.ndarray, labels: np.ndarray) -> Scores:
    """0 where the predictions or the labels are constant or not finite, which leaves a correlation undefined."""
    if not np.isfinite(predicted).all() or len(np.unique(predicted)) < 2 or len(np.unique(labels)) < 2:
        return {"pearson": 0.0, "spearmanr": 0.0}
    pearson, spearman = stats.pearsonr(predicted, labels), stats.spearmanr(predicted, labels)
    return {"pearson": float(pearson.statistic), "spearmanr": float(spearman.statistic)}


# Key -> the names of its scores, the headline first, and what computes them. Names and definitions are those of
# evaluate's "glue" metric; the headline of MRPC and QQP is accuracy, of STS-B pearson.
METRICS: dict[str, tuple[tuple[str, ...], Callable[[np.ndarray, np.ndarray], Scores]]] = {
    "accuracy": (("accuracy",), _accuracy),
    "accuracy_f1": (("accuracy", "f1"), _accuracy_f1),
    "accuracy_macro_f1": (("accuracy", "macro_f1"), _accuracy_macro_f1),
    "matthews_correlation": (("matthews_correlation",), _matthews_correlation),
    "pearson_spearman": (("pearson", "spearmanr"), _pearson_spearman),
}


class TaskMetric(evaluate.Metric):  # type: ignore[misc]
    """A key of METRICS as an evaluate.Metric: metric.compute(predictions=..., references=...) -> {name: score}."""

    def __init__(self, key: str) -> None:
        self.names, self._score = METRICS[key]
        super().__init__(config_name=key, keep_in_memory=True, seed=0)

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float32" if self.config_name == "pearson_spearman" else "int64")
        return evaluate.MetricInfo(
            description=", ".join(self.names),
            citation="",
            inputs_description="predictions, references: one value per sample",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _build_data_dir(self) -> str:
        return tempfile.gettempdir()  # evaluate would make a cache folder here, although nothing is kept in it

    def _compute(self, predictions: list[Any], references: list[Any]) -> Scores:
        return self._score(np.asarray(predictions), np.asarray(references))
