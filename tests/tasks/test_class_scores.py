"""The scores of each class are scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics

from fedllm.tasks.sequence_classification import SequenceClassification, SequenceRegression


def task(count: int) -> SequenceClassification:
    return SequenceClassification([f"c{number}" for number in range(count)], "accuracy_macro_f1")


@pytest.mark.parametrize("count", [2, 3, 7])
def test_recall_precision_auroc_and_confusion_are_those_of_scikit_learn(count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    labels = torch.randint(count, (200,), generator=rng)
    outputs = torch.randn(200, count, generator=rng) + 1.5 * torch.nn.functional.one_hot(labels, count)
    found = task(count).by_class(outputs, labels)
    predicted, probabilities = outputs.argmax(dim=1).numpy(), outputs.double().softmax(dim=1).numpy()
    truth = labels.numpy()
    assert found["names"] == [f"c{number}" for number in range(count)]
    assert found["samples"] == np.bincount(truth).tolist()
    assert found["confusion"] == metrics.confusion_matrix(truth, predicted).tolist()
    assert found["recall"] == pytest.approx(metrics.recall_score(truth, predicted, average=None).tolist())
    assert found["precision"] == pytest.approx(metrics.precision_score(truth, predicted, average=None).tolist())
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, predicted))
    if count == 2:
        expected = metrics.roc_auc_score(truth, probabilities[:, 1])
        assert found["auroc"] == pytest.approx([expected, expected])
    else:
        expected = metrics.roc_auc_score(truth, probabilities, multi_class="ovr", average="macro")
    assert found["macro_auroc"] == pytest.approx(expected)
    assert found["no_answer"] == [0] * count


def test_classes_that_are_not_there_have_no_scores() -> None:
    """Class 2 has no samples, and class 1 is never predicted."""
    outputs = torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.9, 0.0], [0.0, 1.0, 2.0]])
    found = task(3).by_class(outputs, torch.tensor([0, 1, 0]))
    assert found["recall"] == [0.5, 0.0, None]
    assert found["precision"] == [0.5, None, None]
    assert found["balanced_accuracy"] == 0.25
    assert found["auroc"][2] is None
    assert found["confusion"] == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]


def test_samples_without_an_answer_count_as_wrong() -> None:
    outputs = torch.tensor([[2.0, 1.0], [float("nan"), 1.0]])
    found = task(2).by_class(outputs, torch.tensor([0, 0]))
    assert found["recall"] == [0.5, None]
    assert found["no_answer"] == [1, 0]
    assert found["auroc"] == [None, None]
    assert found["macro_auroc"] is None


def test_numbers_have_no_classes() -> None:
    assert SequenceRegression("pearson_spearman").by_class(torch.zeros(2, 1), torch.zeros(2)) is None
