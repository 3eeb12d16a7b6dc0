"""Clients whose samples are points: quadratics with gradients of single samples, and how private steps read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedllm import Problem
from fedllm.data.poisson_batches import PoissonBatches
from fedllm.problems.base import SampleGradients
from fedllm.problems.private import PrivateProblem, seeded_noise

SIZES = (6, 9, 4, 12)


class Points(Problem):
    """f_i(x) = mean_j 0.5 (x - p_j)' diag(h_i) (x - p_j) over the points p_j of client i; `cut` samples in a pass.

    change(points): what is done to the points [n, d] before any is read.
    """

    def __init__(
        self,
        dim: int = 5,
        sizes: Sequence[int] = SIZES,
        cut: int = 3,
        change: Callable[[Tensor], None] = lambda points: None,
    ) -> None:
        draw = torch.Generator().manual_seed(5)
        self.dim, self.num_clients, self.cut = dim, len(sizes), cut
        ends = np.cumsum([0, *sizes])
        self.parts = [np.arange(begin, end) for begin, end in pairwise(ends)]
        self.points = torch.randn(int(ends[-1]), dim, generator=draw, dtype=torch.float64)
        self.curvature = 0.5 + torch.rand(len(sizes), dim, generator=draw, dtype=torch.float64)
        change(self.points)

    def initial(self) -> Tensor:
        return torch.zeros(self.dim, dtype=torch.float64)

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return torch.stack(
            [self.curvature[c] * (x - self.points[self.parts[c]]).mean(0) for x, c in zip(X, clients, strict=True)]
        )

    def sample_gradients(
        self, X: Tensor, samples: Sequence[np.ndarray], clients: Sequence[int], round: int, step: int
    ) -> Iterator[SampleGradients]:
        pairs = [(row, sample) for row, each in enumerate(samples) for sample in each]
        for begin in range(0, len(pairs), self.cut):
            rows, picked = zip(*pairs[begin : begin + self.cut], strict=True)
            h = self.curvature[torch.as_tensor([clients[row] for row in rows])]
            away = X[torch.as_tensor(rows)] - self.points[torch.as_tensor(np.array(picked))]
            yield SampleGradients(rows, 0.5 * (h * away**2).sum(1), h * away)


def private(problem: Problem, parts: Sequence[np.ndarray], **settings: float) -> PrivateProblem:
    """The problem with private gradients. settings: clip, noise, batch_size, seed."""
    seed = int(settings.get("seed", 0))
    batches = PoissonBatches(parts, int(settings.get("batch_size", 3)), seed)
    clip, noise = settings.get("clip", 0.5), settings.get("noise", 0.0)
    return PrivateProblem(problem, batches, clip=clip, noise=noise, draws=seeded_noise(seed))
