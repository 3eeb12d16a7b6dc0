"""The loss and the scores of classes and of values, against closed forms, scikit-learn, scipy and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score
from tiny_models import FAMILIES, save_tiny, tiny_batch

from fedllm.data.loading import Split
from fedllm.data.tokenization import tokenize
from fedllm.models.loading import load_backbone
from fedllm.models.settings import ModelSettings
from fedllm.tasks.base import Task
from fedllm.tasks.sequence_classification import SequenceClassification, SequenceRegression, predicted_classes

CLASSES = SequenceClassification(["a", "b", "c"], "accuracy_macro_f1")
VALUES = SequenceRegression("pearson_spearman")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_losses_in_closed_form() -> None:
    # Two equal logits and one that is log 2 higher: the probabilities are 1/4, 1/4 and 1/2.
    outputs = torch.tensor([[0.0, 0.0, math.log(2)], [1.0, 1.0, 1.0]])
    expected = torch.tensor([math.log(2), math.log(3)])
    torch.testing.assert_close(CLASSES.losses(outputs, torch.tensor([2, 0])), expected)
    assert VALUES.losses(torch.tensor([[1.0], [-2.0]]), torch.tensor([3.0, -2.0])).tolist() == [4.0, 0.0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("task", "targets"), [(CLASSES, torch.tensor([0, 2, 1])), (VALUES, torch.tensor([0.5, -1.0, 2.0]))]
)
def test_the_mean_of_losses_is_the_loss_of_transformers(tmp_path, family: str, task: Task, targets) -> None:
    backbone = load_backbone(ModelSettings(name=save_tiny(tmp_path, family)), task.head)
    found = backbone.model(**tiny_batch(backbone.tokenizer.pad_token_id), labels=targets)
    torch.testing.assert_close(task.losses(found.logits, targets).mean(), found.loss)
    assert task.evaluate(found.logits, targets)["eval_loss"] == pytest.approx(float(found.loss))


def test_losses_are_differentiable_sample_by_sample() -> None:
    outputs = draw(4, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(CLASSES.losses(outputs, torch.tensor([0, 1, 2, 0]))[1], outputs)
    assert gradient[1].abs().min() > 0
    assert gradient[[0, 2, 3]].abs().max() == 0


def test_evaluation_of_classes_is_that_of_sklearn() -> None:
    outputs, targets = draw(50, 3), torch.arange(50) % 3
    predicted = outputs.argmax(dim=1)
    assert CLASSES.evaluate(outputs, targets) == {
        "eval_loss": pytest.approx(float(-outputs.double().log_softmax(dim=1)[torch.arange(50), targets].mean())),
        "accuracy": pytest.approx(accuracy_score(targets, predicted)),
        "macro_f1": pytest.approx(f1_score(targets, predicted, average="macro")),
    }


def test_evaluation_of_values_is_that_of_scipy() -> None:
    values, targets = draw(50, 1), torch.linspace(-1, 1, 50)
    assert VALUES.evaluate(values, targets) == {
        "eval_loss": pytest.approx(float((values[:, 0] - targets).double().square().mean())),
        "pearson": pytest.approx(stats.pearsonr(values[:, 0], targets).statistic),
        "spearmanr": pytest.approx(stats.spearmanr(values[:, 0], targets).statistic),
    }


@pytest.mark.parametrize(("task", "width", "kind"), [(CLASSES, 3, torch.long), (VALUES, 1, torch.float32)])
def test_the_loss_comes_first_and_then_the_metrics_in_their_order(task: Task, width: int, kind: torch.dtype) -> None:
    found = task.evaluate(draw(6, width), torch.arange(6).remainder(3).to(kind))
    assert tuple(found) == ("eval_loss", *task.metric_names)
    assert task.primary == task.metric_names[0]


def test_what_is_no_number_is_wrong() -> None:
    outputs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [math.nan, 0.0, 0.0]])
    found = CLASSES.evaluate(outputs, torch.tensor([0, 1, 0, 0]))
    assert math.isnan(found["eval_loss"])
    assert found["accuracy"] == 0.5
    diverged = VALUES.evaluate(torch.full((3, 1), math.inf), torch.arange(3.0))
    assert diverged == {"eval_loss": math.inf, "pearson": 0.0, "spearmanr": 0.0}


def test_predicted_classes() -> None:
    logits = torch.tensor([[0.1, 0.9], [2.0, 1.0], [math.nan, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    assert predicted_classes(logits).tolist() == [1, 0, -1]


def test_counts_of_each_class() -> None:
    split = Split([["t"] * 6], np.array([0, 2, 2, 0, 1, 2]), {})
    parts = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5])]
    assert CLASSES.class_counts(split, parts) == [[1, 0, 2], [1, 0, 0], [0, 1, 1]]
    assert VALUES.class_counts(split, parts) is None


@pytest.mark.parametrize(("task", "labels"), [(CLASSES, np.array([2, 0])), (VALUES, np.array([0.5, 3.0], np.float32))])
def test_samples_become_tokens_and_targets(tmp_path, task: Task, labels: np.ndarray) -> None:
    tokenizer = load_backbone(ModelSettings(name=save_tiny(tmp_path, "bert")), task.head).tokenizer
    split, told = Split([["red blue", "green"]], labels, {}), []
    tokens = task.encode(split, tokenizer, 8, lambda *step: told.append(step))
    assert tokens.targets.tolist() == labels.tolist()
    assert tokens.targets.numpy().dtype == labels.dtype
    assert tokens.input_ids.tolist() == tokenize(split, tokenizer, 8).input_ids.tolist()
    assert told == [("tokenizing", 2, 2)]
