"""Stacked adapters over one frozen base: one forward and backward serves every client of a cohort.

The rows of a mini-batch are grouped by client, client by client the same number of rows. The frozen layers see one big
batch; beside each of them the adapters A [C, r, in] and B [C, out, r] are two batched matmuls, and so is the task head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedllm.dropout import dropout
from fedllm.errors import UserError
from fedllm.masks import NAME, set_attention
from fedllm.space import ParameterSpace


@dataclass
class _Pass:
    """What the layers of the pass under way need: the clients' parameters, and the rows' dropout keys or None."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None


class CohortModel:
    """A PEFT model whose trainable layers compute with the parameters of C clients at once.

    Built once; it takes over the forward of the LoRA layers, of the trainable Linear layers of the head, and of the
    dropout layers, and the making of attention masks (see `fedllm.masks`); `release` gives them back. The model's own
    trainable values play no part while it is in use. The model stays in eval mode: dropout comes from `keys` alone, and
    attention probabilities are never dropped.
    Raises UserError for a trainable parameter that is in neither a LoRA nor a Linear layer.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self.model, self.space = model.eval(), space
        self._pass = _Pass()
        self._taken: list[nn.Module] = []
        self._install()

    def __call__(self, X: Tensor, inputs: dict[str, Tensor], keys: Tensor | None = None) -> Tensor:
        """Logits [R, labels] in float32 of R = C * n rows, for parameters X [C, d]; differentiable in X.

        inputs: input_ids, attention_mask, ... [R, L]. keys [R]: dropout keys of the rows, None for no dropout.
        """
        self._pass.parameters, self._pass.keys = self.space.views(X), keys
        try:
            logits: Tensor = self.model(**inputs).logits
        finally:
            self._pass.parameters, self._pass.keys = {}, None
        return logits.float()

    def release(self) -> None:
        """Gives the model its own forward methods back."""
        for module in self._taken:
            del module.forward
        self._taken.clear()
        set_attention(self.model, NAME, "sdpa")

    def _install(self) -> None:
        set_attention(self.model, "sdpa", NAME)
        served: set[str] = set()
        trainable = set(self.space.names)
        adapters: set[int] = set()
        layers = 0
        for name, module in self.model.named_modules():
            if id(module) in adapters:
                continue
            if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                adapters |= {
                    id(inner) for part in _LORA_PARTS for inner in getattr(module, part, nn.Module()).modules()
                }
                names = [f"{name}.{part}.{_adapter(module)}.weight" for part in ("lora_A", "lora_B")]
                self._take(module, self._lora(module, names[0], names[1], layers))
                served.update(names)
                layers += 1
            elif isinstance(module, nn.Linear) and f"{name}.weight" in trainable:
                self._take(module, self._linear(f"{name}.weight", f"{name}.bias" if module.bias is not None else None))
                served.update({f"{name}.weight", f"{name}.bias"} & trainable)
            elif isinstance(module, nn.Dropout):
                self._take(module, self._dropout(module.p, layers))
                layers += 1
        if missing := trainable - served:
            raise UserError(
                f"cannot train {sorted(missing)[0]} of several clients at once: expected trainable parameters in LoRA "
                f"layers and in the Linear layers of the task head only"
            )

    def _take(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        module.forward = forward
        self._taken.append(module)

    def _lora(self, module: Any, a: str, b: str, layer: int) -> Callable[..., Tensor]:
        adapter = _adapter(module)
        scale = float(module.scaling[adapter])
        rate = float(getattr(module.lora_dropout[adapter], "p", 0.0))
        base = module.base_layer

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            frozen = base(x, *args, **kwargs)
            A, B = self._pass.parameters[a], self._pass.parameters[b]
            h = (x if self._pass.keys is None else dropout(x, rate, layer, self._pass.keys)).to(A.dtype)
            h = h.reshape(len(A), -1, h.shape[-1])
            out = frozen.reshape(len(B), -1, frozen.shape[-1])
            # One fused operation: frozen + scale * (h A') B'
            return torch.baddbmm(out, torch.bmm(h, A.mT).to(out.dtype), B.mT.to(out.dtype), alpha=scale).view_as(frozen)

        return forward

    def _linear(self, weight: str, bias: str | None) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            W = self._pass.parameters[weight]
            h = x.reshape(len(W), -1, x.shape[-1]).to(W.dtype)
            out = torch.bmm(h, W.mT)
            if bias is not None:
                out = out + self._pass.parameters[bias][:, None]
            return out.view(*x.shape[:-1], out.shape[-1])

        return forward

    def _dropout(self, rate: float, layer: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            # Four dimensions are attention probabilities, which are never dropped.
            keys = self._pass.keys
            return x if keys is None or x.dim() > 3 else dropout(x, rate, layer, keys)

        return forward


_LORA_PARTS = ("lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B")


def _adapter(module: Any) -> str:
    (name,) = module.lora_A.keys()
    return str(name)
