"""The interface of a federated problem: it computes the clients' gradients, one row of parameters per client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedllm.algorithms.base import Contrast
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError


@dataclass(frozen=True)
class Buffers:
    """b numbers of a model that training changes without a gradient: the running statistics of batch norm.

    initial [b]: before the first round. local: each client goes on from its own numbers of its last round; otherwise
    every client begins each round with the server's. The server's are the weighted mean, by the algorithm's weights, of
    those that the accepted clients of the last round ended with.
    """

    initial: Tensor
    local: bool = False


@dataclass(frozen=True)
class SampleGradients:
    """The gradients [R, d] and losses [R] of R samples, each at the row of X [C, d] that `rows` [R] names."""

    rows: Sequence[int]
    losses: Tensor
    gradients: Tensor


class Problem(ABC):
    """N clients, each with its own objective over the same d parameters.

    dim: d. num_clients: N. blocks: the partition of the coordinates, or None for one block per coordinate.
    buffers: None for a model without them. personal [p]: coordinates that each client keeps to itself, in rising order;
    None for none. A client goes on from its own, and the server's stay at x0. smaller_steps: how a user makes a
    client's step need less memory.
    """

    dim: int
    num_clients: int
    blocks: BlockPartition | None = None
    buffers: Buffers | None = None
    personal: Tensor | None = None
    smaller_steps: str = (
        "cut its batches with run.slices=4, or set run.gradient_checkpointing=true (the same result up to rounding), "
        "or lower local.batch_size or data.max_length"
    )

    @abstractmethod
    def initial(self) -> Tensor:
        """The starting point x0 [d]."""

    @abstractmethod
    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        """Stochastic gradients [C, d]: row c is client clients[c]'s at X[c]. X [C, d] is not changed."""

    def loss_and_gradient(
        self, X: Tensor, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        """Mini-batch losses [C], or None if the problem does not compute them, and gradients [C, d]."""
        return None, self.gradient(X, clients, round, step)

    def train_step(
        self, X: Tensor, buffers: Tensor, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        """The same for a problem with buffers: the clients' rows [C, b], changed in place."""
        raise NotImplementedError(f"{type(self).__name__} has buffers, and its train_step is missing")

    def contrastive_gradient(
        self, X: Tensor, contrast: Contrast, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        """`loss_and_gradient` with the contrast in the loss of each sample."""
        raise UserError(
            f"{type(self).__name__}.contrastive_gradient: missing, and MOON needs it; write it, or choose another "
            "algorithm"
        )

    def steps(self, clients: Sequence[int], round: int) -> Tensor | None:
        """Local steps [C] of each client (at least 1), or None: all take the federation's number of steps."""
        return None

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        """Gradients [C, d] of the clients' whole objectives at x [d]."""
        raise UserError(
            f"{type(self).__name__}.full_gradient: missing, and tracking_init=gradient needs it; write it, or choose "
            f"tracking_init=zero"
        )

    def sample_gradients(
        self, X: Tensor, samples: Sequence[np.ndarray], clients: Sequence[int], round: int, step: int
    ) -> Iterator[SampleGradients]:
        """Gradients of single samples, a part at a time: samples[c] are indices of client clients[c]'s, at X[c].

        The samples of a row come in an order that does not depend on the other rows.
        """
        raise UserError(
            f"{type(self).__name__}.sample_gradients: missing, and privacy.level=sample needs it; write it, or choose "
            "privacy.level=client"
        )

    def sizes(self, clients: Sequence[int]) -> Tensor:
        """Samples [C] that the clients hold, for `weights: size`."""
        return torch.ones(len(clients))
