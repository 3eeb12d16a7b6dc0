"""The model-contrastive term of a sample's loss (MOON), on the inputs of the model's last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fedllm.algorithms.base import Contrast
from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from fedllm.problems.model_problem import Losses


@dataclass(frozen=True)
class Representations:
    """A classifier that gives, inside `shown`, the inputs [n, h] of its last layer beside its outputs [n, L].

    layer: that layer. outputs: L.
    """

    layer: nn.Linear
    outputs: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, outputs_of: Callable[[], Tensor]) -> Representations:
        """outputs_of: gives the outputs [n, L] of the model for a sample.

        Raises UserError for a model whose outputs are not those of a Linear layer.
        """
        called: list[tuple[nn.Module, Tensor]] = []

        def note(layer: nn.Module, args: tuple[Tensor, ...], _: Any) -> None:
            if args:
                called.append((layer, args[0].flatten(0, -2)))

        layers = [module for module in model.modules() if isinstance(module, nn.Linear | LoraLayer)]
        handles = [layer.register_forward_hook(note) for layer in layers]
        try:
            plain = outputs_of()
        finally:
            for handle in handles:
                handle.remove()
        last, inputs = called[-1] if called else (None, plain)
        if isinstance(last, nn.Linear) and last.out_features == (count := plain.shape[1]):
            found = cls(last, count)
            with found.shown():
                wide = outputs_of()
            same = torch.equal(wide[:, :count], plain) and wide.shape[1] == count + last.in_features
            if same and bool((inputs.float() == wide[0, count:].to(inputs.device)).all(dim=1).any()):
                return found
        raise UserError(
            f"{type(model).__name__}: its {plain.shape[1]} outputs are not those of a Linear layer at its end, whose "
            "inputs MOON contrasts; name another model, or choose another algorithm"
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the model's outputs are [n, L + h]."""

        def widen(layer: nn.Module, args: tuple[Tensor, ...], found: Tensor) -> Tensor:
            return torch.cat([found, args[0]], dim=-1)

        handle = self.layer.register_forward_hook(widen)
        try:
            yield
        finally:
            handle.remove()

    def add(self, losses: Losses, contrast: Contrast, near: Tensor, far: Tensor) -> Losses:
        """The losses with the contrast, of outputs [n, L + h]. near, far [n, L + h]: those of the other two models."""

        def total(outputs: Tensor, targets: Tensor) -> Tensor:
            z, z_near, z_far = (found[:, self.outputs :] for found in (outputs, near, far))
            return losses(outputs[:, : self.outputs], targets) + contrast.term(z, z_near, z_far)

        return total


Term = tuple[Representations, Contrast]


def require_classifier(samples: object) -> None:
    """Raises UserError for samples with learned tokens, which have no one representation."""
    if getattr(samples, "learned", None) is not None:
        raise UserError(
            "MOON: found a causal language model, expected a classifier, whose last layer reads one representation per "
            "sample; choose another algorithm, such as fedprox"
        )
