import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedllm.data import TASKS
from fedllm.metrics import METRICS, evaluate_logits, metric_for, predictions


def task(metric):
    return SimpleNamespace(metric=metric, regression=metric == "pearson_spearman")


def scores(metric, predicted, labels):
    return metric_for(task(metric)).compute(predictions=predicted, references=labels)


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
def test_names_and_headline(metric):
    module = metric_for(task(metric))
    assert tuple(module.compute(predictions=[0, 1, 1], references=[0, 1, 0])) == module.names
    assert module.primary == module.names[0]


def test_every_known_task_has_its_official_metric():
    assert {known.metric for known in TASKS.values()} <= set(METRICS)
    headline = {name: metric_for(known).primary for name, known in TASKS.items() if name.startswith("glue/")}
    assert headline.pop("glue/cola") == "matthews_correlation"
    assert headline.pop("glue/stsb") == "pearson"
    assert set(headline.values()) == {"accuracy"}


def test_predictions_of_logits():
    logits = torch.tensor([[0.1, 0.9], [2.0, 1.0], [float("nan"), 1.0]], dtype=torch.bfloat16, requires_grad=True)
    assert predictions(logits, regression=False).tolist() == [1, 0, -1]
    assert predictions(np.array([[0.5], [1.5]]), regression=True).tolist() == [0.5, 1.5]


def test_evaluate_logits():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [float("nan"), 0.0]])
    labels = torch.tensor([0, 1, 0, 0])
    assert evaluate_logits(task("accuracy"), logits, labels) == {"accuracy": 0.5}
    assert evaluate_logits(task("pearson_spearman"), logits[:2, :1], np.array([2.0, 1.0], np.float32)) == {
        "pearson": pytest.approx(1.0),
        "spearmanr": pytest.approx(1.0),
    }


def test_nothing_is_written_and_no_draw_is_taken(monkeypatch):
    def refuse(*arguments, **_):
        raise AssertionError(f"touched the disk: {arguments}")

    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    state = np.random.get_state()[1].tolist()
    assert scores("accuracy", np.zeros(10, int), np.zeros(10, int)) == {"accuracy": 1.0}
    assert np.random.get_state()[1].tolist() == state
