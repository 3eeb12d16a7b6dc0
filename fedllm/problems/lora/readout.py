"""What a model gives for each sample, from the rows of a pass: a classifier's logits, or a language model's losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedllm.common.errors import UserError
from fedllm.data.pixels import Pixels
from fedllm.data.samples import Samples
from fedllm.models.lora import base_model
from fedllm.problems.lora.frozen_head import FrozenHead
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.packed_hooks import PackedHooks
from fedllm.problems.lora.pass_context import PassContext


class Readout(ABC):
    """How a transformers model inside a PEFT model is called, and what it gives for each of N samples.

    workspace: bytes that reading needs at most, beside its inputs and results.
    """

    workspace = 0

    def attach(self, context: PassContext) -> None:  # noqa: B027, most have nothing to do
        """Makes the model ready for packed rows; `context` holds the pass under way."""

    def detach(self) -> None:  # noqa: B027
        """Gives the model back as it was."""

    @abstractmethod
    def inputs(self, context: PassContext) -> dict[str, Any]:
        """What the model is called with for the packed rows of the pass under way."""

    @abstractmethod
    def outputs(self, inputs: dict[str, Any], learned: LearnedTokens | None) -> Tensor:
        """Outputs [N, L] in float32. learned: the tokens to predict, None for a classifier."""

    @abstractmethod
    def plain(self, model: Any, inputs: dict[str, Tensor], tokens: Samples, sample: Tensor) -> Tensor:
        """What `comparable` gives for one sample [1, K], from the model's own logits. inputs: those of that sample."""

    def comparable(self, outputs: Tensor) -> Tensor:
        """The part [N, K] of the outputs that differs between any two samples and adapters."""
        return outputs


def readout_of(model: Any, tokens: Samples) -> Readout:
    """The readout for these samples: token by token where the samples have learned tokens."""
    if isinstance(tokens, Pixels):
        return ImageReadout(model)
    return TextReadout(model) if tokens.learned is None else TokenReadout(model)


class ImageReadout(Readout):
    """The outputs of a head of images, which are never packed."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def inputs(self, context: PassContext) -> dict[str, Tensor]:
        raise AssertionError("images are not packed")

    def outputs(self, inputs: dict[str, Tensor], learned: LearnedTokens | None) -> Tensor:
        return self.plain(self._model, inputs)

    def plain(self, model: Any, inputs: dict[str, Tensor], *_: object) -> Tensor:
        found: Tensor = model(**inputs).logits
        return found.float()


class TextReadout(Readout):
    """The outputs of a head that reads one hidden state per text. See PackedHooks for packed rows."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: PackedHooks | None = None

    def attach(self, context: PassContext) -> None:
        self._hooks = PackedHooks(base_model(self._model), context)

    def detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()

    def inputs(self, context: PassContext) -> dict[str, Tensor]:
        """One token per sample: the hooks replace them by the rows."""
        packed = context.current.packed
        assert packed is not None
        token = torch.ones(len(packed.reads), 1, dtype=torch.long, device=packed.reads.device)
        no_padding = 1 if getattr(self._model.config, "pad_token_id", None) != 1 else 0
        return {"input_ids": token * no_padding, "attention_mask": token}

    def outputs(self, inputs: dict[str, Tensor], learned: LearnedTokens | None) -> Tensor:
        found: Tensor = self._model(**inputs).logits
        return found.float()

    def plain(self, model: Any, inputs: dict[str, Tensor], tokens: Samples, sample: Tensor) -> Tensor:
        found: Tensor = model(**inputs).logits
        return found.float()


class TokenReadout(Readout):
    """Sums over the learned tokens of each sample [N, 4]: their cross-entropy, their number, how many of them are the
    model's likeliest token, and whether all are (then greedy decoding gives the whole response).

    The head is called on the hidden states before learned tokens only (see FrozenHead).
    """

    def __init__(self, model: Any) -> None:
        causal = base_model(model)
        if not isinstance(causal, PreTrainedModel):
            raise UserError(f"{type(causal).__name__} is no transformers model; it cannot be trained on tokens")
        self._model, self._kind = model, type(causal).__name__
        self._head = FrozenHead.of(causal)
        self._backbone: nn.Module = getattr(causal, causal.base_model_prefix)
        self.workspace = self._head.workspace

    def inputs(self, context: PassContext) -> dict[str, Any]:
        now = context.current
        assert now.packed is not None
        assert now.mask is not None
        return {**now.packed.given, "attention_mask": now.mask}

    def outputs(self, inputs: dict[str, Any], learned: LearnedTokens | None) -> Tensor:
        assert learned is not None
        hidden = self._backbone(**inputs).last_hidden_state.flatten(0, 1)[learned.places]
        losses, right = self._head.losses(hidden, learned.targets)
        each = torch.stack([losses, torch.ones_like(right), right], dim=1)
        sums = each.new_zeros(learned.count, 3).index_add(0, learned.samples, each)
        return torch.cat([sums, (sums[:, 1:2] == sums[:, 2:3]).float()], dim=1)

    def plain(self, model: Any, inputs: dict[str, Tensor], tokens: Samples, sample: Tensor) -> Tensor:
        """Raises UserError where the head gives other ones."""
        seen: list[Tensor] = []
        layer = base_model(model).get_output_embeddings()
        hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits: Tensor = model(**inputs).logits[0].float()
        finally:
            hook.remove()
        ours = self._head.logits(seen[-1].reshape(len(logits), -1))
        if not torch.allclose(ours, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
            raise UserError(
                f"{self._kind} cannot be trained as a causal language model: its logits are not those of its output "
                f"embedding (scaled by {self._head.scale:g}, capped at {self._head.cap:g}); name another model"
            )
        learned = LearnedTokens.within(tokens, sample.reshape(1).cpu().numpy(), np.zeros(1, np.int64))
        assert learned is not None
        learned = learned.to(logits.device)
        return F.cross_entropy(logits[learned.places], learned.targets).reshape(1, 1)

    def comparable(self, outputs: Tensor) -> Tensor:
        """The mean cross-entropy of a sample's learned tokens."""
        return outputs[:, :1] / outputs[:, 1:2]
