"""Evaluation of the global model on the validation split."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from fedllm.experiment.build import Job
from fedllm.federation.executor import Executor
from fedllm.federation.state import FederationState
from fedllm.results.format import round_to


def evaluate(job: Job, federation: FederationState, executor: Executor) -> dict[str, Any]:
    """Loss and scores on the whole validation split, and the seconds of the evaluation. A value not finite is None."""
    began = time.perf_counter()
    scores = job.task.evaluate(outputs_at(job, federation.x, executor), job.validation.targets)
    finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    return {**finite, "eval_seconds": round_to(time.perf_counter() - began)}


def outputs_at(job: Job, x: Tensor, executor: Executor) -> Tensor:
    """Outputs [n, L] of the whole validation split at x [d], on the CPU and in every process."""
    problem = job.problem

    def work() -> tuple[Tensor, int]:
        return problem.outputs(x, job.validation, executor.rank, executor.size), problem.eval_cuts

    mine, cuts = executor.together(work, lambda rank: "evaluating")
    problem.eval_cuts = max(cuts)
    return executor.sum_parts([mine], executor.size, mine)
