"""Hooks with which a model whose head expects one text per row computes packed rows.

The model gets one token per sample as its input, so that the head sees N rows. The hooks replace this input by the
packed rows before the backbone, and pass on to the head only the hidden states that it reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedllm.problems.lora.pass_context import PassContext


class PackedHooks:
    """The hooks of a transformers model. They do nothing in a pass whose rows are single samples."""

    def __init__(self, model: Any, context: PassContext) -> None:
        self._context = context
        backbone: nn.Module = getattr(model, model.base_model_prefix)
        self._handles: list[RemovableHandle] = [
            backbone.register_forward_pre_hook(self._give_rows, with_kwargs=True),
            backbone.register_forward_hook(self._read_output),
        ]
        if isinstance(pooler := getattr(backbone, "pooler", None), nn.Module):
            self._handles.append(pooler.register_forward_pre_hook(self._read_input))

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()

    def _give_rows(
        self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        now = self._context.current
        return None if now.packed is None else ((), {**now.packed.given, "attention_mask": now.mask})

    def _read_output(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output.last_hidden_state = self._read(output.last_hidden_state)

    def _read_input(self, pooler: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._read(hidden) for hidden in args)

    def _read(self, hidden: Tensor) -> Tensor:
        """hidden [R, L, h] as it is; of packed rows [N, 1, h]: of each sample, the token that the head reads."""
        packed = self._context.current.packed
        return hidden if packed is None else hidden.flatten(0, 1)[packed.reads][:, None]
