"""A model as a function of its flat parameters, its running statistics and a batch; nothing in the model changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.norms import statistics
from fedllm.problems.full.batch_reader import Batch
from fedllm.problems.full.token_losses import TokenLosses, token_losses


class Mode(Enum):
    """TRAIN: dropout, and batch norm by the batch. GRADIENT: no dropout, batch norm by the batch. EVAL: neither."""

    TRAIN = "train"
    GRADIENT = "gradient"
    EVAL = "eval"


class PlainModel:
    """logits(x [d], buffers [b], inputs) of any module whose output has `.logits`.

    space: the trainable parameters. buffers: the running statistics. autocast: dtype of the matrix products, or None.
    tokens: how the losses of learned tokens are computed without the logits of all of them, see `read_tokens`.
    Raises UserError for a batch norm whose statistics depend on the number of batches, see norms.statistics.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        self.model, self.autocast = model, autocast
        self.space, self.buffers = ParameterSpace.of(model), statistics(model)
        self.start = self.space.gather(model)
        named = dict(model.named_buffers())
        values = [named[name].detach().reshape(-1).float() for name in self.buffers.names]
        self.first_buffers = torch.cat(values) if values else self.start.new_empty(0)
        self.tokens: TokenLosses | None = None

    def read_tokens(self, inputs: dict[str, Tensor]) -> None:
        """From now on, `outputs` computes the logits of a few tokens at a time, where the model can be read so.

        inputs: of a sample, on which the logits are compared with the model's own.
        """
        self.tokens = token_losses(self.model, inputs, self.autocast)

    @property
    def workspace(self) -> int:
        """The most bytes that `outputs` needs beside its inputs, its results and what it saves."""
        return 0 if self.tokens is None else self.tokens.workspace

    def outputs(self, x: Tensor, buffers: Tensor | None, batch: Batch) -> Tensor:
        """What the task reads of a batch, [m, L], differentiable in x [d]. buffers: see `logits`."""
        if self.tokens is None or batch.places is None:
            return batch.outputs(self.logits(x, buffers, batch.inputs))
        values = {f"model.{name}": value for name, value in self._values(x, buffers).items()}
        with self._precision(x.device):
            found: Tensor = functional_call(self.tokens, values, (batch.inputs, batch.places))
        return found

    def logits(self, x: Tensor, buffers: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        """The model's logits in float32, differentiable in x [d]. buffers [b] are changed in place in training.

        buffers: None for the model's first ones, which stay.
        """
        with self._precision(x.device):
            found: Tensor = functional_call(self.model, self._values(x, buffers), (), inputs).logits
        return found.float()

    def _values(self, x: Tensor, buffers: Tensor | None) -> dict[str, Tensor]:
        """The parameters and buffers of the model at x and buffers, by name."""
        values = {name: value[0] for name, value in self.space.views(x[None]).items()}
        own = dict(self.model.named_buffers())
        values |= {name: own[name].clone() for name in own}  # a model may count in them; nothing of it is to stay
        if buffers is not None:
            values |= {name: value[0] for name, value in self.buffers.views(buffers[None]).items()}
        return values

    @contextmanager
    def mode(self, mode: Mode) -> Iterator[None]:
        """Sets what the model does inside; afterwards it is in eval mode."""
        self.model.train(mode is Mode.TRAIN)
        if mode is Mode.GRADIENT:
            for module in self.model.modules():
                if isinstance(module, _NormBase):
                    module.train()
        try:
            yield
        finally:
            self.model.eval()

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)
