"""A PEFT model that computes for several clients at once, in one forward and backward of the frozen base."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedllm.common.errors import UserError
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.lora import base_model
from fedllm.models.quantization import lower
from fedllm.problems.lora.attention import NAME, is_causal, set_attention
from fedllm.problems.lora.dropout import Dropout
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.packing import Packed
from fedllm.problems.lora.pass_context import Pass, PassContext
from fedllm.problems.lora.readout import Readout, TextReadout
from fedllm.problems.lora.stacked_modules import CheckpointedBlock, StandIn, make_stand_ins, outermost_blocks


class StackedModel:
    """A PEFT model whose trainable layers compute with the parameters of C clients at once.

    Modules of stacked_modules.py stand in the places of the LoRA layers, of the trainable Linear layers of the head and
    of the dropout layers; `readout` says what is read of the rows; attention.py computes the attention. `release` takes
    all of that out again. The model is in eval mode: dropout comes from `keys` alone, and attention probabilities are
    never dropped. The values of the model's own trainable parameters play no part.

    start [d]: these values at the beginning. exact: whether all parameters were float32 then. causal: whether a token
    attends to earlier ones only. autocast: the dtype of the matrix products, None for the model's own.
    Raises UserError for a trainable parameter that is in neither a LoRA nor a Linear layer.
    """

    def __init__(self, model: Any, space: ParameterSpace, readout: Readout | None = None) -> None:
        self.model, self.space, self.readout = model, space, readout or TextReadout(model)
        self.start = space.gather(model)
        self.exact = all(value.dtype == torch.float32 for value in model.parameters())
        self.causal = is_causal(model)
        self.autocast: torch.dtype | None = None
        self._context = PassContext()
        self._checkpointing = False
        self.stack()

    def stack(self) -> None:
        """Puts the stand-ins and the hooks in, as the constructor does; for a model that was released."""
        self._replaced: list[tuple[str, nn.Module]] = []
        found = make_stand_ins(self.model, self.space.names, self._context)
        self._dropouts, self._adapters = found.dropouts, found.adapters
        self._runs = self.space.runs(self._adapters)
        set_attention(self.model, "sdpa", NAME)
        self._replace(found.modules)
        self.readout.attach(self._context)
        if self._checkpointing:
            self.checkpoint_blocks()

    def release(self) -> None:
        """Puts the model's own modules back, and removes the hooks."""
        for name, original in reversed(self._replaced):
            self.model.set_submodule(name, original)
        self._replaced = []
        self.readout.detach()
        set_attention(self.model, NAME, "sdpa")

    def checkpoint_blocks(self) -> int:
        """Makes the model's blocks save their inputs only, and compute again in the backward pass; returns how many.

        Raises UserError for a model without blocks that transformers can checkpoint.
        """
        blocks = outermost_blocks(self.model)
        if not blocks:
            raise UserError(
                f"run.gradient_checkpointing: {type(base_model(self.model)).__name__} has no layers that transformers "
                f"can checkpoint; leave it false, and cut batches with run.slices instead"
            )
        self._replace([CheckpointedBlock(block, self._context) for block in blocks])
        self._checkpointing = True
        return len(blocks)

    def lower(self, dtype: torch.dtype | None) -> None:
        """Computes matrix products in `dtype` from now on, under autocast; None: in the model's own."""
        lower(self.model, dtype)
        self.autocast = dtype

    @property
    def layers(self) -> int:
        """Layers of the model, as its config counts them."""
        return int(getattr(self.model.config, "num_hidden_layers", 1))

    def __call__(
        self, X: Tensor, inputs: dict[str, Tensor], keys: Tensor | None = None, learned: LearnedTokens | None = None
    ) -> Tensor:
        """Outputs [N, L] in float32 for N = C * m samples and parameters X [C, d]; differentiable in X.

        inputs: input_ids, attention_mask, ... [N, tokens]. keys [N]: dropout keys of the samples, None for no dropout.
        learned: see Readout.outputs.
        """
        dropout = None if keys is None else Dropout(keys, self._dropouts)
        return self._run(Pass(self._parameters(X), dropout, learned=learned), inputs)

    def packed(self, X: Tensor, packed: Packed, keys: Tensor | None = None) -> Tensor:
        """The same for samples in packed rows."""
        dropout = None if keys is None else Dropout(keys, self._dropouts, packed.sample, packed.position)
        mask = packed.mask(self.autocast or base_model(self.model).dtype)
        return self._run(Pass(self._parameters(X), dropout, packed, packed.learned, mask))

    def _parameters(self, X: Tensor) -> dict[str, Tensor]:
        """The clients' parameters; under autocast the adapters are cast here, all at once."""
        if self.autocast is None:
            return self.space.views(X)
        found: dict[str, Tensor] = {}
        for run, values in zip(self._runs, torch.split(X, [run.dim for run in self._runs], dim=1), strict=True):
            found |= run.views(values.to(self.autocast) if run.names[0] in self._adapters else values)
        return found

    def _run(self, wanted: Pass, inputs: dict[str, Tensor] | None = None) -> Tensor:
        """inputs: None for those of packed rows."""
        with self._context.run(wanted), self._precision():
            given = self.readout.inputs(self._context) if inputs is None else inputs
            return self.readout.outputs(given, wanted.learned)

    def _precision(self) -> AbstractContextManager[object]:
        device = self.start.device.type
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)

    def _replace(self, stand_ins: Iterable[StandIn]) -> None:
        """Puts each in its original's place, or places where the model has it under several names."""
        by_original = {id(stand_in.original): stand_in for stand_in in stand_ins}
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if id(module) in by_original:
                self.model.set_submodule(name, by_original[id(module)])
                self._replaced.append((name, module))
