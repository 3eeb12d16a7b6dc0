"""The interface of a problem whose parameters are those of a model, as a run builds it from a recipe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedllm.data.client_batches import ClientBatches
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.base import Problem
from fedllm.problems.contrast import Representations

Losses = Callable[[Tensor, Tensor], Tensor]
"""The loss of each sample [n], a sum over its learned tokens where it has any, of the outputs [n, L] (see Readout) and
the targets [n]; differentiable in the outputs."""


class ModelProblem(Problem):
    """Clients that train a model on samples.

    batches: who takes which samples. eval_cuts: in how many parts each batch of an evaluation is computed.
    """

    batches: ClientBatches
    eval_cuts: int = 1

    @property
    @abstractmethod
    def space(self) -> ParameterSpace:
        """The trainable parameters as one flat vector."""

    @property
    @abstractmethod
    def samples(self) -> Any:
        """The training samples of all clients."""

    @property
    @abstractmethod
    def packed(self) -> bool:
        """Whether a row may hold several samples."""

    @property
    @abstractmethod
    def pass_tokens(self) -> float:
        """Tokens of a pass at most, if one client or sample does not have more, and of a batch of an evaluation."""

    @abstractmethod
    def outputs(self, x: Tensor, samples: Any, part: int = 0, parts: int = 1, buffers: Tensor | None = None) -> Tensor:
        """Outputs [n, L] (float32, CPU) for all samples at x [d] and buffers [b], without dropout.

        Of the batches only every `parts`-th from number `part` on is computed; the rows of the others are zeros.
        Raises RunError where a sample alone does not fit into memory.
        """

    def steps(self, clients: Sequence[int], round: int) -> Tensor:
        return torch.tensor([self.batches.steps(client) for client in clients])

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([float(len(self.batches.parts[client])) for client in clients])

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    @cached_property
    def representations(self) -> Representations:
        """What contrastive_gradient compares, see find_representations."""
        return self.find_representations()

    @abstractmethod
    def find_representations(self) -> Representations:
        """The inputs of the model's last layer. Raises UserError for a model without one."""

    @abstractmethod
    def release(self) -> None:
        """Gives the model back as it was."""
