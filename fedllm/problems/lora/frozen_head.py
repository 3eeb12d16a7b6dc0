"""The cross-entropy of tokens, fused with the frozen head of a language model.

The logits of T tokens over a vocabulary of V words are by far the largest tensor of a pass. The head is not trained,
so the loss needs only the gradient by the hidden states [T, h]. It is computed in the forward pass, together with the
loss, for a chunk of tokens at a time: no more than one chunk's logits exist at any time, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedllm.common.errors import UserError

CHUNK = {"cpu": 2**24, "cuda": 2**26}  # logits that exist at a time
_COPIES = 3  # tensors of a chunk's size that exist together: logits, their logarithms of softmax, and a gradient


@dataclass(frozen=True)
class FrozenHead:
    """The output embedding of a causal language model, and what the model does with its logits.

    layer: its weight is [V, h]. scale: factor of the logits. cap: they become cap * tanh(logits / cap), as in Gemma 2;
    0 for none.
    """

    layer: nn.Linear
    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> FrozenHead:
        """The head of a transformers model. Raises UserError for a model whose output embedding is not Linear."""
        layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(layer, nn.Linear):
            found = "none" if layer is None else type(layer).__name__
            raise UserError(
                f"{type(model).__name__} cannot be trained as a causal language model: its output embedding is "
                f"{found}, expected Linear; name another model"
            )
        config = model.config.get_text_config()

        def given(key: str, default: float) -> float:
            return float(getattr(config, key, None) or default)

        scale = given("logit_scale", 1.0) / given("logits_scaling", 1.0)
        return cls(layer, scale, given("final_logit_softcapping", 0.0))

    @property
    def words(self) -> int:
        """V, the size of the vocabulary."""
        return len(self.layer.weight)

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        return max(1, CHUNK[self.layer.weight.device.type] // self.words)

    @property
    def workspace(self) -> int:
        """The most bytes that the loss needs beside its inputs and results."""
        return 4 * _COPIES * self.chunk * self.words

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits [T, V] in float32 of hidden states [T, h]."""
        return self.finish(self.layer(hidden))

    def finish(self, products: Tensor) -> Tensor:
        """The model's logits in float32 of the layer's outputs [T, V]."""
        found = products.float()
        if self.scale != 1.0:
            found = found * self.scale
        return self.cap * torch.tanh(found / self.cap) if self.cap else found

    def losses(self, hidden: Tensor, targets: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        """The cross-entropy of each token [T], differentiable in `hidden` [T, h], and whether it is the likeliest [T].

        targets [T]: the tokens' ids. chunk: tokens whose logits exist at a time, by default as many as `CHUNK` allows.
        """
        size = chunk or self.chunk
        losses, right = _TokenLosses.apply(hidden, targets, self, size)  # type: ignore[no-untyped-call]
        return losses, right


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: FrozenHead, chunk: int) -> tuple[Tensor, Tensor]:
        losses, right = torch.empty(2, len(targets), device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits, wanted = head.logits(hidden[part]), targets[part, None]
            logs = F.log_softmax(logits, dim=-1)
            losses[part] = -logs.gather(1, wanted)[:, 0]
            right[part] = ((logs.argmax(dim=-1) == wanted[:, 0]) & losses[part].isfinite()).float()
            if gradient is not None:
                slope = logs.exp_().scatter_add_(1, wanted, logs.new_full(wanted.shape, -1.0))
                if head.cap:
                    slope *= 1.0 - (logits / head.cap) ** 2
                if head.scale != 1.0:
                    slope *= head.scale
                gradient[part] = slope.to(head.layer.weight.dtype) @ head.layer.weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return slopes[0][:, None].to(gradient.dtype) * gradient, None, None, None
