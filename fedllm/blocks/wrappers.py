"""Finds the layers inside PEFT's wrappers. Wrappers are recognised by their structure; peft is not imported.

LoRA layer              X.base_layer (the layer itself), X.lora_A.<adapter>, X.lora_B.<adapter>, ...
modules_to_save         X.original_module, X.modules_to_save.<adapter>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

LAYER = "layer"
"""The `part` of a Place for the layer itself, as opposed to an adapter."""

_INNER = ("base_layer", "original_module")


@dataclass(frozen=True)
class Place:
    """The layer that a module belongs to, with wrappers removed.

    owner: path of that layer, which is the path of its outermost wrapper ('h.0.query' for 'h.0.query.base_layer').
    part: LAYER, or the name of the adapter's part ('lora_A', 'lora_B', ...).
    """

    owner: str
    part: str


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module, parents before their children. A shared layer has several paths."""
    return dict(model.named_modules(remove_duplicate=False))


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a PEFT wrapper around one layer."""
    return any(child in module._modules for child in _INNER)


def unwrap(module: nn.Module) -> nn.Module:
    """The layer inside its wrappers."""
    while is_wrapper(module):
        module = next(module.get_submodule(child) for child in _INNER if child in module._modules)
    return module


def find_places(modules: dict[str, nn.Module]) -> dict[str, Place]:
    """The place of every module of `modules_by_path`."""
    places = {"": Place("", LAYER)}
    for path in filter(None, modules):
        parent, _, child = path.rpartition(".")
        holder, above = modules[parent], places[parent]
        if child in _INNER or (child == "modules_to_save" and is_wrapper(holder)):
            places[path] = Place(above.owner, LAYER)
        elif is_wrapper(holder):
            places[path] = Place(above.owner, child)
        elif isinstance(holder, nn.ModuleDict) and above.owner != parent:  # a wrapper's dictionary of adapters
            places[path] = above
        else:
            places[path] = Place(path, LAYER)
    return places


def readable(name: str) -> str:
    """A parameter's name without PEFT's wrapping.

    'base_model.model.h.0.query.lora_B.default.weight' becomes 'h.0.query.lora_B'.
    """
    name = re.sub(r"\.(base_layer|modules_to_save\.default)(?=\.)", "", name.removeprefix("base_model.model."))
    return re.sub(r"(\.lora_\w+)\.default(\.weight)?$", r"\1", name)
