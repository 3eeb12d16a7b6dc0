"""How much is computed at once: tokens of a pass and clients of a cohort (`run.cohort: auto`), and the memory of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.console import warn
from fedllm.costs import row_vectors
from fedllm.lora_problem import LoraProblem
from fedllm.memory import available_memory, total_memory
from fedllm.processes import local_size

CPU_PASS = 128 * 2**20  # see pass_bytes
# A pass's peak over what autograd keeps of it, and what comes to it however small it is: together above all of the
# peaks that benchmarks/cohort.py measured (cohort.png).
WORKING = 1.6
ALWAYS = 64 * 2**20
USABLE = 0.8  # of the memory that is free
STEPS = 10  # the steps of round 1 that are looked through for the largest pass


def pass_bytes(device: torch.device) -> float:
    """What a pass of several clients may keep for its backward, fixed by the device whatever else it is doing.

    On a CPU 128 MiB: 1,300 tokens of MiniLM, 160 of GPT-2. In benchmarks/cohort.json (one core, float32) training gains
    up to there where clients' batches are small (1.2 times as fast as one client at a time for MiniLM, 1.1 for GPT-2),
    and nothing where they are large; beyond it nothing gains, and MiniLM loses up to 16% in training and 26% in
    evaluation at 256 MiB. Less suits MiniLM with two samples a client (64 MiB by 7%, 32 by 17%), but costs GPT-2's
    evaluation 15% and 37%.

    On a GPU the bound awaits measurement. Until then it is one of memory alone, and careful: a quarter of the GPU's.
    """
    return CPU_PASS if device.type == "cpu" else total_memory(device) / 4


@dataclass(frozen=True)
class Need:
    """What memory is needed for, in bytes, beside the frozen weights: `fixed` of every pass, `token` kept of each token
    of the largest pass, `client` of each client's vectors, `evaluation` of an evaluation batch."""

    fixed: float
    token: float
    client: float
    evaluation: float

    @classmethod
    def of(cls, algorithm: Algorithm, problem: LoraProblem) -> Need:
        """Without gradients, an evaluation batch holds what it would keep of one layer at a time."""
        client = 4.0 * problem.dim * max(row_vectors(algorithm).values())
        evaluation = problem.pass_tokens * problem.token_bytes / problem.layers
        return cls(problem.fixed_bytes, problem.token_bytes, client, evaluation)

    def bytes(self, clients: int, tokens: int) -> int:
        """The peak of `clients` clients whose largest pass has `tokens` tokens, or of evaluation between rounds."""
        kept = max(self.fixed + tokens * self.token, self.evaluation)
        return round(ALWAYS + WORKING * kept + clients * self.client)

    def of_cohort(self, problem: LoraProblem, cohort: int) -> int:
        """The peak of a cohort of the clients with the most samples."""
        sizes = problem.sizes(range(problem.num_clients))
        largest = sizes.argsort(descending=True, stable=True)[:cohort].tolist()
        return self.bytes(cohort, problem.largest_pass(largest, STEPS))


def fit(cohort: int, peak: Callable[[int], float], most: float) -> int:
    """The size, halved until `peak` of it is `most` or less; 1 at least."""
    while cohort > 1 and peak(cohort) > most:
        cohort //= 2
    return cohort


def usable_memory(device: torch.device) -> float:
    """Bytes that a cohort may take: of what is free, divided among the processes that share the CPU, or the GPU."""
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return USABLE * available_memory(device) / math.ceil(local_size() / devices)


def choose_cohort(
    wanted: int | Literal["auto"], algorithm: Algorithm, problem: LoraProblem, info: RoundInfo, device: torch.device
) -> int:
    """The cohort size of a run: `run.cohort`, or with "auto" all clients of a round, halved until the estimated peak is
    at most half of the memory that the device has. Passes being bounded, a larger cohort costs memory only; see
    pass_bytes.

    Cut into waves, with a warning, where either needs more memory than is free.
    """
    need = Need.of(algorithm, problem)

    def peak(size: int) -> int:
        return need.of_cohort(problem, size)

    cohort = fit(info.sampled, peak, total_memory(device) / 2) if wanted == "auto" else min(wanted, info.sampled)
    free = usable_memory(device)
    fitting = fit(cohort, peak, free)
    if fitting < cohort:
        warn(
            f"a cohort of {cohort} clients needs about {peak(cohort) / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of {device.type} memory can be used: cut into waves of {fitting} (the same result "
            f"up to rounding)"
        )
    return fitting
