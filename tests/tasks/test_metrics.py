import os

import numpy as np
import pytest

from fedllm.data.known_datasets import KNOWN_DATASETS
from fedllm.tasks.metrics import METRICS, TaskMetric


def scores(metric, predicted, labels):
    return TaskMetric(metric).compute(predictions=predicted, references=labels)


def test_accuracy():
    assert scores("accuracy", [0, 1, 1, 0], [0, 1, 0, 0]) == {"accuracy": 0.75}


def test_f1_is_of_the_positive_class():
    # 2 true positives, 1 false positive, 2 false negatives: F1 = 2*2 / (2*2 + 1 + 2).
    found = scores("accuracy_f1", [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0])
    assert found == {"accuracy": 0.5, "f1": pytest.approx(4 / 7)}


def test_matthews_correlation():
    # tp 2, fp 1, fn 1, tn 2: (2*2 - 1*1) / sqrt(3*3*3*3).
    found = scores("matthews_correlation", [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0])
    assert found == {"matthews_correlation": pytest.approx(3 / 9)}


def test_macro_f1_weighs_classes_equally():
    # Class F1: 0 -> 2*2/(2*2+0+1), 1 -> 2*1/(2*1+1+0), 2 -> 0 (predicted never, there once).
    found = scores("accuracy_macro_f1", [0, 0, 1, 1, 1], [0, 0, 0, 1, 2])
    assert found == {"accuracy": 0.6, "macro_f1": pytest.approx((4 / 5 + 2 / 4 + 0) / 3)}


def test_pearson_and_spearman():
    # A monotone but curved relation: ranks agree, values do not.
    x = np.array([0.0, 1.0, 2.0, 3.0])
    found = scores("pearson_spearman", x**2, x)
    deviation = x - x.mean(), x**2 - (x**2).mean()
    expected = (deviation[0] @ deviation[1]) / np.sqrt((deviation[0] ** 2).sum() * (deviation[1] ** 2).sum())
    assert found == {"pearson": pytest.approx(expected, rel=1e-6), "spearmanr": pytest.approx(1.0)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("metric", "predicted", "labels", "expected"),
    [
        ("matthews_correlation", [1, 1], [0, 1], {"matthews_correlation": 0.0}),
        ("matthews_correlation", [1, 1], [1, 1], {"matthews_correlation": 0.0}),
        ("accuracy_f1", [0, 0], [0, 0], {"accuracy": 1.0, "f1": 0.0}),
        ("accuracy_f1", [0, -1], [0, 1], {"accuracy": 0.5, "f1": 0.0}),
        ("accuracy_macro_f1", [-1, -1], [0, 1], {"accuracy": 0.0, "macro_f1": 0.0}),
        ("pearson_spearman", [2.0, 2.0], [0.0, 1.0], {"pearson": 0.0, "spearmanr": 0.0}),
        ("pearson_spearman", [np.nan, 2.0], [0.0, 1.0], {"pearson": 0.0, "spearmanr": 0.0}),
    ],
)
def test_degenerate_cases_are_numbers(metric, predicted, labels, expected):
    assert scores(metric, predicted, labels) == expected


@pytest.mark.parametrize("metric", METRICS)
def test_names(metric):
    module = TaskMetric(metric)
    assert tuple(module.compute(predictions=[0, 1, 1], references=[0, 1, 0])) == module.names


def test_every_known_task_has_its_official_metric():
    assert {known.metric for known in KNOWN_DATASETS.values()} <= set(METRICS)


def test_nothing_is_written_and_no_draw_is_taken(monkeypatch):
    def refuse(*arguments, **_):
        raise AssertionError(f"touched the disk: {arguments}")

    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    state = np.random.get_state()[1].tolist()
    assert scores("accuracy", np.zeros(10, int), np.zeros(10, int)) == {"accuracy": 1.0}
    assert np.random.get_state()[1].tolist() == state
