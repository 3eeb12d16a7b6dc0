"""Memory of training all weights, counted before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedllm.algorithms.base import Algorithm, RoundInfo, values
from fedllm.common.errors import UserError
from fedllm.common.memory import total_memory
from fedllm.experiment.memory_plan import ALWAYS, WORKING, usable_memory
from fedllm.federation.costs import row_vectors
from fedllm.problems.full.problem import FullProblem

CPU_PASS = 2**30  # see full_pass_bytes


def full_pass_bytes(device: torch.device) -> float:
    """The most bytes that a pass over all weights may store for its backward; larger batches are cut.

    CPU: 1 GiB, a choice: vectors of d numbers and not activations fill the memory. GPU: a quarter of its memory.
    """
    return CPU_PASS if device.type == "cpu" else total_memory(device) / 4


@dataclass(frozen=True)
class FullNeed:
    """Bytes that a run which trains all weights needs at once.

    model: the weights as they were loaded. server: x, the server's vectors, and those that replace them. clients: the
    vectors of the clients trained together, in a step or while their uploads are reduced. sums: of the uploads, in
    float64. activations: of a pass.
    """

    model: float
    server: float
    clients: float
    sums: float
    activations: float

    @classmethod
    def of(
        cls, algorithm: Algorithm, problem: FullProblem, info: RoundInfo, together: int, private: bool = False
    ) -> FullNeed:
        """The need of an algorithm on a problem, with that many clients trained together. private: whether the samples
        of a pass are rows with vectors of their own."""
        d = problem.dim
        passed = problem.largest_sample_pass_bytes(together) if private else problem.largest_pass_bytes(together)
        server = sum(values(of, d, info.blocks.num_blocks) for of in algorithm.server_vectors().values())
        sent = len({**algorithm.uploads(), **algorithm.tracked_uploads()})
        copies = 5  # of each sum: a part's, the joined one, and three while parts are joined
        drift = 2 * (1 + (0 if "d" in algorithm.uploads() else 1) + (2 if algorithm.moment else 0))
        return cls(
            model=8.0 * d,  # and the copy of it that x begins as
            server=8.0 * (d + server),
            clients=4.0 * d * max(row_vectors(algorithm).values()) * together,
            sums=8.0 * d * (copies * sent + drift),
            activations=ALWAYS + WORKING * (problem.passes.memory.fixed + passed),
        )

    @property
    def bytes(self) -> float:
        """All at once. The pass is over before uploads are reduced, so the larger of these counts."""
        return self.model + self.server + self.clients + max(self.activations, self.sums)

    def __str__(self) -> str:
        parts = {
            "the model": self.model,
            "x and the server's vectors": self.server,
            "a client's vectors": self.clients,
            "a pass": self.activations,
            "sums of uploads": self.sums,
        }
        listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
        return f"about {self.bytes / 2**20:,.0f} MiB at once ({listed})"


def require_memory(need: FullNeed, device: torch.device, name: str) -> None:
    """Raises UserError where the run cannot fit. The model has been loaded already. name: of the algorithm."""
    wanted, free = need.bytes - need.model, usable_memory(device)
    if wanted > free:
        raise UserError(
            f"lora: null trains all weights, which needs {need}; {free / 2**20:,.0f} MiB of {device.type} memory can "
            f"be used beside the model. Train adapters (leave out lora: null), take a smaller model, fewer stacked "
            f"clients or an algorithm with fewer vectors than {name}, or lower local.batch_size"
        )
