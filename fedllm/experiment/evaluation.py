"""Evaluation of the global model on the validation split."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedllm.data.samples import Samples
from fedllm.experiment.job import Job
from fedllm.federation.executor import Executor
from fedllm.federation.state import FederationState
from fedllm.results.format import round_to


def evaluate(job: Job, federation: FederationState, executor: Executor) -> dict[str, Any]:
    """Loss and scores on the whole validation split, and the seconds of the evaluation. A value not finite is None."""
    began = time.perf_counter()
    scores = scores_at(job, federation.x, job.validation, executor, federation.buffers)
    scores |= choices_at(job, federation.x, executor)
    return {**finite(scores), "eval_seconds": round_to(time.perf_counter() - began)}


def scores_at(
    job: Job, x: Tensor, samples: Samples, executor: Executor, buffers: Tensor | None = None
) -> dict[str, float]:
    """Loss and scores of x [d] on these samples. buffers: see outputs_at."""
    return job.task.evaluate(outputs_at(job, x, samples, executor, buffers), samples.targets)


def finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    """The scores; None in the place of a value that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def choices_at(job: Job, x: Tensor, executor: Executor) -> dict[str, float]:
    """The scores of the validation split's multiple-choice questions at x [d]; {} if it has none."""
    if job.options is None:
        return {}
    return job.task.choose(outputs_at(job, x, job.options.tokens, executor), job.options)


def outputs_at(job: Job, x: Tensor, tokens: Samples, executor: Executor, buffers: Tensor | None = None) -> Tensor:
    """Outputs [n, L] of n samples at x [d], on the CPU and in every process.

    buffers [b]: the running statistics of batch norm; None for those of the model before training, if it has any.
    """
    problem = job.problem

    def work() -> tuple[Tensor, int]:
        return problem.outputs(x, tokens, executor.rank, executor.size, buffers), problem.eval_cuts

    mine, cuts = executor.together(work, lambda rank: "evaluating")
    problem.eval_cuts = max(cuts)
    return executor.sum_parts([mine], executor.size, mine)
