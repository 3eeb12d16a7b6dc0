"""Which coordinates of the flat vector are those of the task's head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedllm.common.errors import UserError
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import Backbone
from fedllm.models.lora import PREFIX


def head_coordinates(model: nn.Module, backbone: Backbone) -> Tensor:
    """The coordinates [p] of the head's trainable parameters, in rising order.

    model: the backbone's, with LoRA or with all weights trainable. Raises UserError for a model without a head.
    """
    space = ParameterSpace.of(model)
    found, first = [torch.empty(0, dtype=torch.long)], 0
    for name, size in zip(space.names, space.sizes, strict=True):
        if any(name.removeprefix(PREFIX).startswith(f"{path}.") for path in backbone.head):
            found.append(torch.arange(first, first + size))
        first += size
    places = torch.cat(found)
    if not len(places):
        raise UserError(
            f"deployment.keep_local: found head, but {backbone.name} is trained without a head of its own; leave it out"
        )
    return places
