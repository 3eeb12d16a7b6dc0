"""What training changed: the scores before round 1, and the scores of each value of a column and of each class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedllm.experiment.evaluation import choices_at, outputs_at
from fedllm.experiment.job import Job
from fedllm.federation.executor import Executor

Scores = dict[str, float | None]


def compare(job: Job, x: Tensor, executor: Executor, buffers: Tensor | None = None) -> dict[str, Any]:
    """The entries of result.json that `eval.start`, `eval.by` and `eval.by_class` ask for.

    x [d], buffers [b]: the trained model.
    start: the scores before round 1. by: the column, and of each of its values the number of validation samples, the
    final scores and, with eval.start, those before round 1. by_class: see ClassScores, of the final model.
    """
    settings = job.recipe.eval
    outputs: dict[str, Tensor] = {}
    if settings.by is not None or settings.by_class:
        outputs["final"] = outputs_at(job, x, job.validation, executor, buffers)
    found: dict[str, Any] = {}
    if settings.start:
        before = job.problem.initial()
        outputs["start"] = outputs_at(job, before, job.validation, executor)
        found["start"] = _scores(job, outputs["start"]) | choices_at(job, before, executor)
    if settings.by is not None:
        column = job.dataset.validation.columns[settings.by]
        found["by"] = {"column": settings.by, "values": _by_value(job, column, outputs)}
    if settings.by_class:
        found["by_class"] = job.task.by_class(outputs["final"], job.validation.targets)
    return found


def _by_value(job: Job, column: Sequence[Any], outputs: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    places: dict[str, list[int]] = {}
    for sample, value in enumerate(column):
        places.setdefault(str(value), []).append(sample)
    return {
        value: {"samples": len(own), **{when: _scores(job, found, np.array(own)) for when, found in outputs.items()}}
        for value, own in sorted(places.items())
    }


def _scores(job: Job, outputs: Tensor, own: np.ndarray | None = None) -> Scores:
    """The scores of all samples, or of some; a value that is not finite is None."""
    targets = job.validation.targets
    given = (outputs, targets) if own is None else (outputs[own], targets[own])
    return {name: value if math.isfinite(value) else None for name, value in job.task.evaluate(*given).items()}
