"""What a user is warned of about labelled data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedllm.data.loading import Split
from fedllm.data.review import review


def split(texts: str, labels: Sequence[float]) -> Split:
    return Split([texts.split()], np.array(labels), {})


def test_nothing_is_said_of_data_without_oddities() -> None:
    assert review(split("a b c d", [0, 0, 1, 1]), split("e f", [0, 1]), ("bad", "good")) == []
    assert review(split("a b", [0.5, 1.0]), split("e f", [0.1, 0.2]), ()) == []


def test_shared_and_relabelled_texts_are_counted() -> None:
    found = review(split("a a b b c d", [0, 1, 0, 0, 1, 1]), split("a e c", [0, 1, 0]), ("bad", "good"))
    assert found[0].startswith("2 of 3 validation samples have a text that the training split has too")
    assert found[1:] == ["texts that have different labels in different rows: 2"]


def test_classes_that_are_written_alike_and_rare_ones_are_named() -> None:
    names = ("Routine follow-up", "routine  follow-up ", "urgent", "y" * 60)
    found = review(split("a b c d e", [0, 0, 1, 2, 2]), split("f g", [2, 3]), names)
    assert found[0].startswith("the classes 'Routine follow-up', 'routine  follow-up ' differ only in case or blanks")
    assert found[1] == f"classes with one sample only: 'routine  follow-up ', '{'y' * 37}...'"


def test_a_class_that_is_most_of_the_validation_split() -> None:
    texts = " ".join(f"v{row}" for row in range(20))
    found = review(split("a b c d", [0, 0, 1, 1]), split(texts, [1] * 17 + [0] * 3), ("bad", "good"))
    assert found == [
        "85% of the validation samples are of class 'good': a model that always answers so has accuracy 0.850"
    ]


def test_many_names_are_counted() -> None:
    texts = " ".join(f"t{row}" for row in range(8))
    (found,) = review(split(texts, range(8)), split("x y z u", [8, 8, 9, 9]), [f"c{i}" for i in range(10)])
    assert found == "classes with one sample only: 'c0', 'c1', 'c2', 'c3', 'c4' and 3 more"
