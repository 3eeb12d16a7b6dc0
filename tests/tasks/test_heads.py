"""What a head says to transformers and PEFT, and the heads that cannot be."""

from __future__ import annotations

import pytest
import transformers
from peft import TaskType

from fedllm.common.errors import UserError
from fedllm.tasks.heads import sequence_head


def test_a_classifier_names_its_outputs() -> None:
    config = sequence_head(2, label_names=["no", "yes"]).config
    assert config == {
        "num_labels": 2,
        "id2label": {0: "no", 1: "yes"},
        "label2id": {"no": 0, "yes": 1},
        "problem_type": "single_label_classification",
    }


def test_without_names_the_labels_are_those_of_transformers() -> None:
    for head, kind in (
        (sequence_head(3), "single_label_classification"),
        (sequence_head(1, regression=True), "regression"),
    ):
        plain = transformers.BertConfig(num_labels=head.config["num_labels"])
        assert head.config["id2label"] == plain.id2label
        assert head.config["label2id"] == plain.label2id
        assert head.config["problem_type"] == kind


def test_transformers_and_peft_know_the_head() -> None:
    head = sequence_head(2)
    assert head.auto_class in dir(transformers)
    assert TaskType(head.task_type) is TaskType.SEQ_CLS


def test_heads_that_cannot_be() -> None:
    with pytest.raises(UserError, match="at least 1"):
        sequence_head(0)
    with pytest.raises(UserError, match="1 output, found num_labels=2"):
        sequence_head(2, regression=True)
    with pytest.raises(UserError, match="expected 2 of them"):
        sequence_head(2, label_names=["only one"])
