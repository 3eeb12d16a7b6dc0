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

# A pass's peak over what autograd keeps of it, and what comes to it however small it is: together at or above most of
# the peaks that benchmarks/cohort.py measured (cohort.png).
WORKING = 1.6
ALWAYS = 64 * 2**20
CPU_KEPT = 256 * 2**20  # see rule
USABLE = 0.8  # of the memory that is free
STEPS = 10  # the steps of round 1 that are looked through for the largest pass


@dataclass(frozen=True)
class Need:
    """What a cohort's memory is made of, in bytes, beside the frozen weights: `fixed` of every pass, `token` kept of
    each padded token of the largest pass, `client` of each client's vectors."""

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
        return round(ALWAYS + WORKING * (self.fixed + tokens * self.token) + clients * self.client)

    def of_cohort(self, problem: LoraProblem, cohort: int) -> int:
        """The peak of a cohort of the clients with the most samples."""
        return self.bytes(cohort, largest_pass(problem, cohort))


def largest_pass(problem: LoraProblem, cohort: int) -> int:
    """Padded tokens of the largest pass of the clients with the most samples, in their first steps."""
    sizes = problem.sizes(range(problem.num_clients))
    return problem.pass_tokens(sizes.argsort(descending=True, stable=True)[:cohort].tolist(), STEPS)


def rule(device: torch.device, sampled: int, kept: Callable[[int], float], peak: Callable[[int], float]) -> int:
    """`run.cohort: auto`: all clients of a round, halved until a pass of theirs is small enough. Fixed by the device,
    the dtype, the model's size and the tokens, whatever else the machine is doing.

    On a CPU, a pass may keep 256 MiB for its backward pass. In benchmarks/cohort.json (one core, float32, padded rows)
    a cohort is up to there 1.0 to 1.4 times as fast as one client at a time, for MiniLM (to 2048 tokens) and GPT-2 (to
    304 tokens) alike, but for one case of GPT-2 (0.85 with two clients of batch 2). Beyond it GPT-2 gains 3% at 416
    MiB, and MiniLM at 399 MiB and GPT-2 at 833 MiB lose 8%. That the bound is bytes and not tokens follows from the
    two models, whose tokens weigh 0.1 and 0.8 MiB.

    On a GPU the rule awaits measurement. Until then it is one of memory alone, and careful: the estimated peak may be
    half of the GPU's memory.

    kept, peak: bytes that a cohort of that size keeps in its largest pass, and takes at most.
    """
    if device.type == "cuda":
        return fit(sampled, peak, total_memory(device) / 2)
    return fit(sampled, kept, CPU_KEPT)


def fit(cohort: int, peak: Callable[[int], float], most: float) -> int:
    """The size, halved until `peak` of it is `most` or less; 1 at least."""
    while cohort > 1 and peak(cohort) > most:
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

    def kept(size: int) -> float:
        return need.token * largest_pass(problem, size)

    def peak(size: int) -> int:
        return need.of_cohort(problem, size)

    cohort = min(wanted, info.sampled) if wanted != "auto" else rule(device, info.sampled, kept, peak)
    free = usable_memory(device)
    fitting = fit(cohort, peak, free)
    if fitting < cohort:
        warn(
            f"a cohort of {cohort} clients needs about {peak(cohort) / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of {device.type} memory can be used: cut into waves of {fitting} (the same result "
            f"up to rounding)"
        )
    return fitting
