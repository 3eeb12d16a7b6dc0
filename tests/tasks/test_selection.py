"""Which task and metric a recipe's data get."""

from __future__ import annotations

import pytest

from fedllm.data.known_datasets import KNOWN_DATASETS
from fedllm.data.settings import DataSettings
from fedllm.tasks.metrics import METRICS
from fedllm.tasks.selection import score_names, task_of

OWN = DataSettings(train="own.csv")


def test_your_own_classes() -> None:
    task = task_of(OWN, ["bad", "good"])
    assert (task.classes, task.describe(), task.primary) == (("bad", "good"), "2 classes", "accuracy")
    assert task.metric_names == ("accuracy", "macro_f1")
    assert task.head.config["id2label"] == {0: "bad", 1: "good"}


def test_your_own_numbers() -> None:
    task = task_of(OWN, ())
    assert (task.classes, task.describe(), task.primary) == ((), "a regression", "pearson")
    assert task.metric_names == ("pearson", "spearmanr")
    assert task.head.config["num_labels"] == 1


@pytest.mark.parametrize("name", KNOWN_DATASETS)
def test_a_known_data_set_has_its_official_metric(name: str) -> None:
    known = KNOWN_DATASETS[name]
    task = task_of(DataSettings(name=name), known.classes)
    assert task.metric_names == METRICS[known.metric][0]
    assert task.classes == known.classes
    assert task.describe() == ("a regression" if name == "glue/stsb" else f"{len(known.classes)} classes")


def test_the_headlines_of_glue() -> None:
    headline = {
        name: task_of(DataSettings(name=name), known.classes).primary
        for name, known in KNOWN_DATASETS.items()
        if name.startswith("glue/")
    }
    assert headline.pop("glue/cola") == "matthews_correlation"
    assert headline.pop("glue/stsb") == "pearson"
    assert set(headline.values()) == {"accuracy"}


def test_a_file_called_like_a_known_data_set_is_your_own() -> None:
    assert task_of(DataSettings(train="glue/cola"), ["0", "1"]).primary == "accuracy"


@pytest.mark.parametrize(("settings", "classes"), [(OWN, ()), (OWN, ["a", "b"]), (DataSettings(name="glue/stsb"), ())])
def test_names_before_the_data_are_read_hold_those_of_the_task(settings: DataSettings, classes: list[str]) -> None:
    assert {*task_of(settings, classes).metric_names, "eval_loss"} <= {*score_names(settings)}


def test_names_before_the_data_are_read() -> None:
    assert score_names(DataSettings(name="glue/qqp")) == ["accuracy", "f1", "eval_loss"]
    assert score_names(OWN) == ["accuracy", "macro_f1", "pearson", "spearmanr", "eval_loss"]
