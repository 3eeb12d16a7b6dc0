"""Fine-tuning of copies of the global model at clients, for evaluations alone: nothing of it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedllm.algorithms.base import clip
from fedllm.federation.local_training import Progress
from fedllm.federation.setup import Setup
from fedllm.problems import checks


def finetune(
    setup: Setup,
    X: Tensor,
    clients: Sequence[int],
    round: int,
    steps: int,
    buffers: Tensor | None = None,
    progress: Progress = lambda done: None,
) -> Tensor:
    """The rows X [C, d] after so many local steps of the clients, which train together; X does not change.

    The steps are those of the algorithm's first round: its server's and its clients' vectors are at their start, so no
    correction, contrast or global moment is in them, and a proximal term draws to X. The rate is constant, without
    warm-up. The clients take the batches and dropout of round `round`, drawn by (seed, round, client). buffers [C, b]:
    running statistics, changed in place. progress: called after each step with the number of clients.
    """
    alg, info = replace(setup.algorithm, schedule="constant", warmup_rounds=0), setup.at(0).info
    rates = alg.rates(torch.full((len(clients),), steps), info).to(X)
    local = alg.begin(X, alg.init_server(X[0], info), alg.init_clients(X, info), info)
    for k in range(steps):
        _, g = checks.loss_and_gradient(setup.problem, local["x"], clients, round, k, buffers)
        alg.step(local, clip(g, alg.clip_norm), k + 1, rates[:, k : k + 1], info)
        progress(len(clients))
    return local["x"]
