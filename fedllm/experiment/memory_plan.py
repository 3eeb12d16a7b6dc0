"""Chooses the tokens per forward pass and the clients trained together (`run.stacked_clients: auto`), by memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.common.console import warn
from fedllm.common.memory import available_memory, total_memory
from fedllm.distributed.process_group import local_size
from fedllm.federation.costs import row_vectors
from fedllm.problems.lora.problem import LoraProblem

CPU_PASS = 128 * 2**20  # see pass_bytes
LOW_TOKENS = 768  # see least_tokens
# Peak memory of a pass <= ALWAYS (bytes, for a pass of any size) + WORKING * bytes that autograd stores. The values
# make this bound larger than all peaks that benchmarks/memory/stacked_clients.py measured.
WORKING = 1.6
ALWAYS = 64 * 2**20
USABLE = 0.8  # of the memory that is free
STEPS = 10  # steps of round 1 among which the largest pass is searched


def pass_bytes(device: torch.device) -> float:
    """The most bytes that a pass of several clients may store for its backward. Depends on the device alone.

    CPU: 128 MiB, which is 1,300 tokens of MiniLM or 160 of GPT-2. Measurements in docs/results.md (one core, float32):
    - Up to this size, training gains speed if clients' batches are small: 1.2 times as fast as one client at a time
      for MiniLM, 1.1 times for GPT-2. With large batches it gains none.
    - Above this size, nothing gains. At 256 MiB, MiniLM loses up to 16% in training and 26% in evaluation.
    - Below this size, MiniLM with two samples per client gains (7% at 64 MiB, 17% at 32 MiB), but GPT-2's evaluation
      loses (15% and 37%).

    GPU: a quarter of its memory. This bound is not measured yet.
    """
    return CPU_PASS if device.type == "cpu" else total_memory(device) / 4


def least_tokens(device: torch.device, autocast: torch.dtype | None) -> int:
    """Tokens that a pass of several clients may have in any case, if they save at most 4 * pass_bytes.

    bfloat16 on a CPU: 768. Products are twice as fast there as in float32, so that what a pass costs apart from them
    counts twice. SmolLM2-135M, whose 128 MiB are 220 tokens, gains 11 to 16% at 660 and 880 tokens (docs/results.md);
    MiniLM has more in 128 MiB anyway. Elsewhere 0.
    """
    return LOW_TOKENS if device.type == "cpu" and autocast is not None else 0


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a run needs in addition to the frozen weights.

    fixed: per pass. token: stored per token of the largest pass. client: vectors per client. evaluation: per
    evaluation batch. private: whether the samples of a pass are rows with vectors of their own.
    """

    fixed: float
    token: float
    client: float
    evaluation: float
    private: bool = False

    @classmethod
    def of(cls, algorithm: Algorithm, problem: LoraProblem, private: bool = False) -> Need:
        """The need of an algorithm on a problem. An evaluation batch, without gradients, needs one layer at a time."""
        client = 4.0 * problem.dim * max(row_vectors(algorithm).values())
        evaluation = problem.pass_tokens * problem.token_bytes / problem.layers
        return cls(problem.fixed_bytes, problem.token_bytes, client, evaluation, private)

    def bytes(self, clients: int, tokens: int) -> int:
        """Peak bytes of training `clients` clients with at most `tokens` tokens per pass, or of evaluation."""
        kept = max(self.fixed + tokens * self.token, self.evaluation)
        return round(ALWAYS + WORKING * kept + clients * self.client)

    def of_clients(self, problem: LoraProblem, count: int) -> int:
        """Peak bytes of training together the `count` clients with the most samples."""
        sizes = problem.sizes(range(problem.num_clients))
        largest = sizes.argsort(descending=True, stable=True)[:count].tolist()
        largest_pass = problem.largest_sample_pass if self.private else problem.largest_pass
        return self.bytes(count, largest_pass(largest, STEPS))


def fit(count: int, peak: Callable[[int], float], most: float) -> int:
    """Halves `count` until `peak(count)` is at most `most`; the result is at least 1."""
    while count > 1 and peak(count) > most:
        count //= 2
    return count


def usable_memory(device: torch.device) -> float:
    """Bytes that clients trained together may use: USABLE of the free memory, per process on this CPU or GPU."""
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return USABLE * available_memory(device) / math.ceil(local_size() / devices)


def choose_stacked_clients(
    wanted: int | Literal["auto"],
    algorithm: Algorithm,
    problem: LoraProblem,
    info: RoundInfo,
    device: torch.device,
    private: bool = False,
) -> int:
    """How many clients a run trains together: the recipe's number, or with "auto" all clients of a round.

    With "auto", the number is halved until the estimated peak is at most half of the device's memory. The size of a
    pass is bounded (pass_bytes), so more clients cost only memory. If the number needs more memory than is free, a
    warning is printed and fewer clients are trained together. private: see Need.
    """
    need = Need.of(algorithm, problem, private)

    def peak(size: int) -> int:
        return need.of_clients(problem, size)

    stacked = fit(info.sampled, peak, total_memory(device) / 2) if wanted == "auto" else min(wanted, info.sampled)
    free = usable_memory(device)
    fitting = fit(stacked, peak, free)
    if fitting < stacked:
        warn(
            f"{stacked} clients together need about {peak(stacked) / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of "
            f"{device.type} memory can be used: {fitting} are trained together (the same result up to rounding)"
        )
    return fitting
