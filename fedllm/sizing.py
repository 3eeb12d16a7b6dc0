"""How many clients train together: the rule behind `run.cohort: auto`, and the memory that a cohort needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.console import warn
from fedllm.costs import client_memory
from fedllm.lora_problem import LoraProblem
from fedllm.memory import available_memory, total_memory

# A pass's peak over the bytes that autograd keeps of it: 1.48 to 1.62 where benchmarks/cohort.py measured it.
WORKING = 1.6
USABLE = 0.8  # of the memory that is free
STEPS = 10  # the steps of round 1 that are looked through for the largest pass


@dataclass(frozen=True)
class Need:
    """What a cohort's memory is made of, in bytes, beside the frozen weights: `fixed` of every pass, `token` of each
    padded token of the largest pass, `client` of each client's vectors."""

    fixed: float
    token: float
    client: float

    @classmethod
    def of(cls, algorithm: Algorithm, problem: LoraProblem, info: RoundInfo) -> Need:
        """Counted on the model itself: two short forward passes of the longest sample tell what autograd keeps."""
        one, two = (problem.kept_bytes(rows) for rows in (1, 2))
        values = sum(client_memory(algorithm, info, problem.dim, frozen=0).values())
        return cls(2 * one - two, (two - one) / problem.longest, 4.0 * values)

    def bytes(self, clients: int, tokens: int) -> int:
        """The peak of `clients` clients whose largest pass has `tokens` padded tokens."""
        return round(WORKING * (self.fixed + tokens * self.token) + clients * self.client)

    def of_cohort(self, problem: LoraProblem, cohort: int) -> int:
        """The peak of a cohort of the clients with the most samples."""
        sizes = problem.sizes(range(problem.num_clients))
        largest = sizes.argsort(descending=True, stable=True)[:cohort].tolist()
        return self.bytes(cohort, problem.pass_tokens(largest, STEPS))


def rule(device: torch.device, sampled: int, step_tokens: float, need: Need) -> int:
    """TODO"""
    return sampled


def fit(cohort: int, peak: Callable[[int], int], memory: float) -> int:
    """The size, halved until `peak` of it, in bytes, is within the memory; 1 at least."""
    while cohort > 1 and peak(cohort) > memory:
        cohort //= 2
    return cohort


def usable_memory(device: torch.device) -> float:
    """Bytes that a cohort may take: of what is free, divided among the CPU processes of this machine."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    return USABLE * available_memory(device) / sharing


def choose_cohort(
    wanted: int | Literal["auto"], algorithm: Algorithm, problem: LoraProblem, info: RoundInfo, device: torch.device
) -> int:
    """The cohort size of a run: `run.cohort`, or the rule's; cut into waves, with a warning, where it needs more memory
    than there is."""
    need = Need.of(algorithm, problem, info)
    size = rule(device, problem.step_tokens, need) if wanted == "auto" else wanted
    cohort = min(size, info.sampled)
    free = usable_memory(device)
    fitting = fit(cohort, lambda size: need.of_cohort(problem, size), free)
    if fitting < cohort:
        warn(
            f"a cohort of {cohort} clients needs about {need.of_cohort(problem, cohort) / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of {device.type} memory can be used: cut into waves of {fitting} (the same result "
            f"up to rounding)"
        )
    return fitting
