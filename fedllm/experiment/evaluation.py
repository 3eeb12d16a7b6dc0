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
    problem = job.problem

    def work() -> tuple[Tensor, int]:
        found = problem.outputs(federation.x, job.validation, executor.rank, executor.size, federation.buffers)
        return found, problem.eval_cuts

    mine, cuts = executor.together(work, lambda rank: "evaluating")
    problem.eval_cuts = max(cuts)
    outputs = executor.sum_parts([mine], executor.size, mine)
    scores = job.task.evaluate(outputs, job.validation.targets)
    finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    return {**finite, "eval_seconds": round_to(time.perf_counter() - began)}
