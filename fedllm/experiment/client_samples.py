"""How many samples of each class, or of each value of partition.column, each client has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedllm.data.loading import Dataset
from fedllm.data.partitioning import summary
from fedllm.tasks.base import Task


@dataclass(frozen=True)
class SampleCounts:
    """names: of the classes, or of the values of a column that stands in for labels. counts: samples, [N, names]."""

    names: tuple[str, ...]
    counts: list[list[int]]


def count_samples(dataset: Dataset, task: Task, parts: Sequence[np.ndarray]) -> SampleCounts | None:
    """The samples of N clients by class or value; None where there is neither. parts: each client's training rows."""
    if dataset.groups:
        return SampleCounts(dataset.groups, summary(parts, dataset.train.labels, len(dataset.groups)).tolist())
    counts = task.class_counts(dataset.train, parts)
    return None if counts is None else SampleCounts(task.classes, counts)
