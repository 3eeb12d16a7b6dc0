"""Stacked adapters over one frozen base: one forward and backward serves every client of a cohort.

The rows of a mini-batch are grouped by client. The frozen layers see one big batch; beside each of them the adapters
A [C, r, in] and B [C, out, r] are two batched matmuls, or a loop where clients differ in rows; so is the task head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fedllm.dropout import Dropout
from fedllm.errors import UserError
from fedllm.lora import base_model
from fedllm.masks import NAME, set_attention
from fedllm.packing import Packed
from fedllm.ragged import ragged_lora
from fedllm.space import ParameterSpace


@dataclass
class _Pass:
    """What the layers of the pass under way need: the clients' parameters, the samples' dropout or None, and the packed
    rows, None where a row is a sample. been: how often each layer has dropped, which in ALBERT is once a depth."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    dropout: Dropout | None = None
    packed: Packed | None = None
    been: Counter[int] = field(default_factory=Counter)

    def drop(self, x: Tensor, rate: float, layer: int) -> Tensor:
        """Dropout of x [samples, F] or [rows, L, F]."""
        if self.dropout is None:
            return x
        self.been[layer] += 1
        return self.dropout(x, rate, layer, self.been[layer] - 1)


class CohortModel:
    """A PEFT model whose trainable layers compute with the parameters of C clients at once.

    checkpointing: whether blocks keep their inputs only, and are computed again in the backward pass (gradient
    checkpointing); blocks: how many can.

    Built once; it takes over the forward of the LoRA layers, of the trainable Linear layers of the head, of the blocks
    and of the dropout layers, and the making of attention masks (see `fedllm.masks`); `release` gives them back. The
    model's own trainable values play no part while it is in use. The model is in eval mode: dropout comes from `keys`
    alone, and attention probabilities are never dropped.
    Raises UserError for a trainable parameter that is in neither a LoRA nor a Linear layer.
    """

    def __init__(self, model: Any, space: ParameterSpace) -> None:
        self.model, self.space = model, space
        self._pass = _Pass()
        self.checkpointing = False
        self._taken: list[nn.Module] = []
        self._no_padding = 1 if getattr(model.config, "pad_token_id", None) != 1 else 0
        self._install()

    def __call__(self, X: Tensor, inputs: dict[str, Tensor], keys: Tensor | None = None) -> Tensor:
        """Logits [N, labels] in float32 of N = C * m samples, for parameters X [C, d]; differentiable in X.

        inputs: input_ids, attention_mask, ... [N, L]. keys [N]: dropout keys of the samples, None for no dropout.
        """
        dropout = None if keys is None else Dropout(keys, self._layers)
        return self._run(_Pass(self._parameters(X), dropout), inputs)

    def packed(self, X: Tensor, packed: Packed, keys: Tensor | None = None) -> Tensor:
        """The same of samples in packed rows. The head is given N samples of one token, the one it reads."""
        token = torch.ones(len(packed.reads), 1, dtype=torch.long, device=X.device)
        inputs = {"input_ids": token * self._no_padding, "attention_mask": token}
        dropout = None if keys is None else Dropout(keys, self._layers, packed.sample, packed.position)
        return self._run(_Pass(self._parameters(X), dropout, packed), inputs)

    def _parameters(self, X: Tensor) -> dict[str, Tensor]:
        """The clients' parameters; under autocast its adapters are cast here, all at once."""
        if (low := _autocast(X.device)) is None:
            return self.space.views(X)
        found: dict[str, Tensor] = {}
        for run, values in zip(self._runs, torch.split(X, [run.dim for run in self._runs], dim=1), strict=True):
            found |= run.views(values.to(low) if run.names[0] in self._adapters else values)
        return found

    def _run(self, wanted: _Pass, inputs: dict[str, Tensor]) -> Tensor:
        self._pass = wanted
        try:
            logits: Tensor = self.model(**inputs).logits
        finally:
            self._pass = _Pass()
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
        self._layers = 0  # those with dropout
        self._adapters: set[str] = set()
        for name, module in self.model.named_modules():
            if id(module) in adapters:
                continue
            if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                adapters |= {
                    id(inner) for part in _LORA_PARTS for inner in getattr(module, part, nn.Module()).modules()
                }
                names = [f"{name}.{part}.{_adapter(module)}.weight" for part in ("lora_A", "lora_B")]
                self._take(module, self._lora(module, names[0], names[1], self._layers))
                self._adapters.update(names)
                self._layers += 1
            elif isinstance(module, nn.Linear) and f"{name}.weight" in trainable:
                self._take(module, self._linear(f"{name}.weight", f"{name}.bias" if module.bias is not None else None))
                served.update({f"{name}.weight", f"{name}.bias"} & trainable)
            elif isinstance(module, nn.Dropout):
                self._take(module, self._dropout(module.p, self._layers))
                self._layers += 1
        self._read_packed()
        self._recompute_blocks()
        self._runs = self.space.runs(self._adapters)
        if missing := trainable - served - self._adapters:
            raise UserError(
                f"cannot train {sorted(missing)[0]} of several clients at once: expected trainable parameters in LoRA "
                f"layers and in the Linear layers of the task head only"
            )

    def _recompute_blocks(self) -> None:
        """A block's outermost layer, as transformers marks those that can be checkpointed, keeps its input only."""
        self.blocks = 0
        inside: set[int] = set()
        for block in self.model.modules():
            if isinstance(block, GradientCheckpointingLayer) and id(block) not in inside:
                inside |= {id(module) for module in block.modules()}
                self._take(block, self._recomputed(block.forward))
                self.blocks += 1

    def _recomputed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self.checkpointing and torch.is_grad_enabled()):
                return run(*args, **kwargs)
            wanted, been = self._pass, self._pass.been.copy()

            def again(*args: Any, **kwargs: Any) -> Any:
                """In the backward pass too, when another pass, or none, is under way."""
                under_way, self._pass = self._pass, replace(wanted, been=been.copy())
                try:
                    return run(*args, **kwargs)
                finally:
                    wanted.been |= self._pass.been
                    self._pass = under_way

            # Nothing is drawn from a generator, dropout included: its state need not be kept.
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return forward

    def _read_packed(self) -> None:
        """Between the backbone and the head, only the tokens that the head reads go on from a packed pass."""
        whole = base_model(self.model)
        backbone: Any = getattr(whole, whole.base_model_prefix)
        whole_pass, pooler = backbone.forward, getattr(backbone, "pooler", None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if (packed := self._pass.packed) is None:
                return whole_pass(*args, **kwargs)
            mask = packed.mask(_autocast(packed.sample.device) or whole.dtype)
            found = whole_pass(**packed.inputs, attention_mask=mask)
            found.last_hidden_state = self._read(found.last_hidden_state)
            return found

        self._take(backbone, forward)
        if isinstance(pooler, nn.Module):
            pool = pooler.forward
            self._take(pooler, lambda hidden: pool(self._read(hidden)))

    def _read(self, hidden: Tensor) -> Tensor:
        """hidden [R, L, h] as it is, of packed rows the tokens [N, 1, h] that the head reads."""
        packed = self._pass.packed
        return hidden if packed is None else hidden.flatten(0, 1)[packed.reads][:, None]

    def _take(self, module: nn.Module, forward: Callable[..., Any]) -> None:
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
            h, packed = self._pass.drop(x, rate, layer).to(A.dtype), self._pass.packed
            if packed is not None and not packed.equal:
                tokens = [count * x.shape[1] for count in packed.counts]
                out = ragged_lora(h.flatten(0, 1), frozen.flatten(0, 1), A, B, tokens, scale)
                return out.view_as(frozen)
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
            return x if x.dim() > 3 else self._pass.drop(x, rate, layer)

        return forward


_LORA_PARTS = ("lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B")


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype of the matrix products under autocast, if that is on."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def _adapter(module: Any) -> str:
    (name,) = module.lora_A.keys()
    return str(name)
