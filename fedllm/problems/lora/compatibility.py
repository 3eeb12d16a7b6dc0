"""Checks, before a run begins, that a model computes for several clients at once what it computes for each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedllm.common.errors import UserError
from fedllm.common.memory import out_of_memory
from fedllm.data.samples import Samples
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.lora import base_model
from fedllm.problems.lora.readout import Readout


class IndependenceCheck:
    """Two clients with trainable values X [2, d] drawn at random, each with the shortest and the longest sample.

    index [4]: these samples. alone [2, 2, K]: what the plain PEFT model gives for them (see Readout.comparable), one
    sample at a time and without padding. Raises UserError where the model cannot compute them, or they are not finite.
    """

    @torch.no_grad()
    def __init__(self, model: Any, space: ParameterSpace, tokens: Samples, readout: Readout) -> None:
        self._kind = type(base_model(model)).__name__
        x = space.gather(model)
        self.X = x.repeat(2, 1)
        draw = torch.Generator().manual_seed(0)
        for value in space.views(self.X).values():
            value.copy_(torch.randn(value.shape, generator=draw) / (3 * value.shape[-1]) ** 0.5)
        samples = torch.stack([tokens.lengths.argmin(), tokens.lengths.argmax()])
        self.index = samples.repeat(2)
        self._readout = readout
        found = []
        try:
            for row in self.X:
                space.scatter(model, row)
                for sample in samples:
                    inputs = {name: value.to(x.device) for name, value in tokens.rows(sample[None]).items()}
                    found.append(readout.plain(model, inputs, tokens, sample))
        except UserError:
            raise
        except Exception as error:  # the model's own code, which may fail in any way
            if out_of_memory(error):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{self._kind} cannot compute a sample of the data: {said}") from error
        finally:
            space.scatter(model, x)
        self.alone = torch.cat(found).view(2, 2, -1)
        if not self.alone.isfinite().all():
            raise UserError(f"{self._kind} gives logits that are not finite for samples of the data")

    @torch.no_grad()
    def compare(self, together: Callable[[Tensor, Tensor], Tensor], tolerance: float) -> None:
        """Raises UserError where the outputs of both clients in one padded batch differ from those `alone`, or where
        the model's dropout is a function call and not a layer.

        together: outputs [4, L] of both clients for X and index. tolerance: of the difference, relative to that between
        the outputs of the two clients.
        """
        with _FunctionalDropout() as dropout:
            found = together(self.X, self.index)
        if dropout.rate:
            raise UserError(
                f"{self._kind} drops out at a rate of {dropout.rate:g} with torch.nn.functional.dropout, which cannot "
                f"be drawn client by client; set model.dropout=0 to train without"
            )
        found = self._readout.comparable(found)
        apart = float((found.view_as(self.alone) - self.alone).norm() / (self.alone[0] - self.alone[1]).norm())
        if not apart < tolerance:
            raise UserError(
                f"{self._kind} cannot be trained for several clients at once: in one batch two clients' samples get "
                f"other logits than alone (by {apart:.2g} of how far the clients lie apart), because its layers mix "
                f"samples or look at their padding"
            )


class _FunctionalDropout(TorchFunctionMode):
    """Records the highest rate of dropout that is called as a function, but on attention probabilities, which have four
    dimensions."""

    rate = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and args[0].dim() <= 3:
            self.rate = max(self.rate, kwargs["p"])
        return func(*args, **kwargs)
