"""All trainable parameters of a model as ONE flat vector."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterSpace:
    """Names and shapes of the trainable parameters, including the task head, in the order of named_parameters."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, named: nn.Module | Iterable[tuple[str, Tensor]]) -> ParameterSpace:
        """The space of a module's trainable parameters, or of given (name, tensor) pairs."""
        pairs = list(_trainable(named)) if isinstance(named, nn.Module) else list(named)
        return cls(tuple(name for name, _ in pairs), tuple(tuple(value.shape) for _, value in pairs))

    @property
    def sizes(self) -> list[int]:
        """The number of values of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def dim(self) -> int:
        """d, the length of the flat vector."""
        return sum(self.sizes)

    def runs(self, names: Collection[str]) -> list[ParameterSpace]:
        """Consecutive parts of this space. In each part, either all parameters are in `names` or none is."""
        pairs = zip(self.names, self.shapes, strict=True)
        found = [list(run) for _, run in groupby(pairs, key=lambda pair: pair[0] in names)]
        return [ParameterSpace(tuple(name for name, _ in run), tuple(shape for _, shape in run)) for run in found]

    def views(self, X: Tensor) -> dict[str, Tensor]:
        """{name: [C, *shape]} as views into X [C, d].

        Differentiable: the backward pass makes one concatenation for all parameters.
        """
        parts = torch.split(X, self.sizes, dim=1)
        return {
            name: part.view(len(X), *shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def gather(self, module: nn.Module, *, grad: bool = False) -> Tensor:
        """The module's trainable values, or their gradients, as one vector [d] in float32 or a wider dtype.

        A parameter without a gradient gives zeros.
        """
        values = dict(module.named_parameters())
        tensors = [values[name].grad if grad else values[name].detach() for name in self.names]
        flat = [
            torch.zeros(size, device=values[name].device) if tensor is None else tensor.detach().reshape(-1)
            for name, size, tensor in zip(self.names, self.sizes, tensors, strict=True)
        ]
        joined = torch.cat(flat)
        return joined.to(torch.promote_types(joined.dtype, torch.float32))

    @torch.no_grad()
    def scatter(self, module: nn.Module, x: Tensor) -> None:
        """Writes x [d] into the module's trainable parameters."""
        values = dict(module.named_parameters())
        for name, part in self.views(x[None]).items():
            values[name].copy_(part[0])


def _trainable(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in module.named_parameters() if value.requires_grad)
