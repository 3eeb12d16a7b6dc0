"""The losses of a causal language model's learned tokens, without the logits of all tokens at a time.

The logits of T tokens over a vocabulary of V words are by far the largest tensor of a pass. They are computed for a
chunk of tokens at a time, in the forward pass for the losses, and again in the backward pass for the gradients: by the
hidden states [T, h], and by the head, which is trained too. problems.lora.frozen_head has a head that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedllm.problems.full.learned_places import LearnedPlaces, summed
from fedllm.problems.lora.frozen_head import FrozenHead


class TokenLosses(nn.Module):
    """A causal language model as a function of inputs and places: sums over its tokens, see learned_places.sums.

    model: inside, so that its parameters can be replaced. low: dtype of the head's products, None for float32.
    """

    def __init__(self, model: PreTrainedModel, low: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self._head, self._low = model, FrozenHead.of(model), low

    @property
    def workspace(self) -> int:
        """The most bytes that the losses need beside their inputs and results."""
        return self._head.workspace

    def forward(self, inputs: dict[str, Tensor], places: LearnedPlaces) -> Tensor:
        """Sums [m, 4] of the m samples in `inputs`, differentiable in the parameters."""
        hidden = self._hidden(inputs)[places.row, places.place]
        layer = self._head.layer
        losses, right = _Losses.apply(  # type: ignore[no-untyped-call]
            hidden, layer.weight, layer.bias, places.target, self._head, self._low
        )
        return summed(losses, right, places.row, places.real, len(inputs["input_ids"]))

    @torch.no_grad()
    def agrees(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the model's own logits of `inputs` are those of its output embedding on its last hidden states."""
        logits: Tensor = self.model(**inputs).logits.float()
        ours = self._head.logits(self._hidden(inputs))
        return torch.allclose(ours, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        backbone = getattr(self.model, self.model.base_model_prefix)
        found: Tensor = backbone(**inputs).last_hidden_state
        return found


def token_losses(model: nn.Module, inputs: dict[str, Tensor], low: torch.dtype | None = None) -> TokenLosses | None:
    """The losses of this model's tokens; None where its logits are not those of its output embedding alone.

    inputs: of a sample on which the two are compared.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    if not isinstance(model.get_output_embeddings(), nn.Linear):  # type: ignore[no-untyped-call]
        return None
    found = TokenLosses(model, low)
    return found if found.agrees(inputs) else None


class _Losses(torch.autograd.Function):
    """The cross-entropy [T] of each token, and whether it is the likeliest [T], of hidden states [T, h] and a head's
    weight [V, h] and bias [V] or None. See TokenLosses."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: FrozenHead, low: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.low = head, low
        ctx.save_for_backward(hidden, weight, bias, targets)
        losses, right = torch.empty(2, len(targets), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _chunks(hidden, weight, bias, head, low):
                wanted = targets[part]
                losses[part] = F.cross_entropy(logits, wanted, reduction="none")
                right[part] = ((logits.argmax(dim=1) == wanted) & losses[part].isfinite()).float()
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head, low = ctx.head, ctx.low
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _chunks(hidden, weight, bias, head, low):
                slope = logits.softmax(dim=1)
                slope.scatter_add_(1, targets[part, None], slope.new_full((len(slope), 1), -1.0))
                slope *= slopes[0][part, None]
                if head.cap:
                    slope *= 1.0 - (logits / head.cap) ** 2
                if head.scale != 1.0:
                    slope *= head.scale
                lowered = _low(slope, low)
                of_hidden[part] = (lowered @ _low(weight, low)).to(of_hidden.dtype)
                _add_product(of_weight, lowered.T, _low(hidden[part], low))
                if of_bias is not None:
                    of_bias += slope.sum(dim=0)
        return of_hidden, of_weight, of_bias, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: FrozenHead, low: torch.dtype | None
) -> Iterator[tuple[slice, Tensor]]:
    """The model's logits [n, V] in float32 of chunks of tokens, each with its slice of the tokens."""
    lowered, shift = _low(weight, low), None if bias is None else _low(bias, low)
    for begin in range(0, len(hidden), head.chunk):
        part = slice(begin, begin + head.chunk)
        yield part, head.finish(F.linear(_low(hidden[part], low), lowered, shift))


def _low(value: Tensor, low: torch.dtype | None) -> Tensor:
    return value.float() if low is None else value.to(low)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
