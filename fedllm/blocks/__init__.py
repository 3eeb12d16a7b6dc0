"""Partitions coordinates into blocks with one second moment each, by each weight's role (FedAdamW paper, App. D).

Usable alone, in any torch project:

    from fedllm.blocks import partition

    bp = partition(model)        # any nn.Module, PEFT-wrapped or not; its trainable parameters as one flat vector of d
    small = bp.means(v)          # [..., d] -> [..., B], what a client sends instead of v
    v = bp.expand(small)         # [..., B] -> [..., d]
    print(bp.table())

Its only dependency is torch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from .attention import Attention, RoleError, find_attention
from .layout import BlockPartition, Run, Tile, whole
from .roles import role_tiles
from .wrappers import readable

__all__ = ["Attention", "BlockPartition", "RoleError", "find_attention", "partition"]

SCHEMES = ("hessian", "tensor", "elementwise", "none")


def partition(
    model: nn.Module,
    scheme: str = "hessian",
    trainable_only: bool = True,
    unknown: str = "error",
    min_block_size: int | None = None,
) -> BlockPartition:
    """Partition a model's parameters, flattened and joined in the order of model.named_parameters(), into blocks.

    scheme: `hessian`: query and key weights by attention head; every other matrix by output neuron, token, class or
            LoRA direction (its rows; the columns of a GPT-2 Conv1D, its fused query, key and value separately);
            convolutions by output filter; stacked experts by expert and output row; a vector is one block. `tensor`:
            one block per tensor. `elementwise`: one block per coordinate. `none`: one block in total.
    trainable_only: only the parameters that require a gradient.
    unknown: what to do with a weight of unknown role: `error`, or `tensor` (one block). An attention of unknown layout
            is ignored if none of its own weights are to be partitioned.
    min_block_size: merge neighbouring blocks of a tensor until each has at least so many coordinates, or is the whole
            tensor. The paper's limit of floor(d / min_block_size) blocks then holds for each tensor.

    Raises RoleError (a ValueError) naming the weights of unknown role, and ValueError for a wrong argument
    or a model with nothing to partition. Source: FedAdamW paper, Appendix D (D.3 for `tensor`).
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: found {scheme!r}, expected one of {', '.join(SCHEMES)}")
    if unknown not in ("error", "tensor"):
        raise ValueError(f"unknown: found {unknown!r}, expected error or tensor")
    if min_block_size is not None and (not isinstance(min_block_size, int) or min_block_size < 1):
        raise ValueError(f"min_block_size: found {min_block_size}, expected a whole number, 1 or more")
    shapes = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not trainable_only
    }
    if not any(shape.numel() for shape in shapes.values()):
        kind = "trainable parameters (trainable_only=True)" if trainable_only else "parameters"
        raise ValueError(f"{type(model).__name__} has no {kind}: nothing to partition")
    tiles = _tiles(model, {name: shape for name, shape in shapes.items() if shape.numel()}, scheme, unknown)
    if min_block_size is not None:
        tiles = [tile.merged(min_block_size) for tile in tiles]
    return BlockPartition(tuple(replace(tile, name=readable(tile.name)) for tile in tiles), _slices(shapes))


def _tiles(model: nn.Module, shapes: dict[str, torch.Size], scheme: str, unknown: str) -> list[Tile]:
    if scheme == "hessian":
        return role_tiles(model, shapes, unknown)
    if scheme == "tensor":
        return [whole(name, "tensor", shape.numel()) for name, shape in shapes.items()]
    if scheme == "elementwise":
        return [Tile(name, "coordinate", (Run("coordinate", shape.numel(), 1),)) for name, shape in shapes.items()]
    return [whole("all coordinates", "all", sum(shape.numel() for shape in shapes.values()))]


def _slices(shapes: dict[str, torch.Size]) -> dict[str, slice]:
    """The slice of the flat vector that each parameter occupies."""
    stops = list(accumulate(shape.numel() for shape in shapes.values()))
    return {name: slice(start, stop) for name, start, stop in zip(shapes, [0, *stops[:-1]], stops, strict=True)}
