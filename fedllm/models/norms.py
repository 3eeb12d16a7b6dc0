"""Batch norm in a model: where its running statistics are, and group norm in its place."""

from __future__ import annotations

from math import gcd
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedllm.common.errors import UserError
from fedllm.models.flat_parameters import ParameterSpace

GROUPS = 2  # of a group norm: Adaptive Federated Optimization (Reddi et al. 2021), ResNet-18; a *choice* elsewhere


def statistics(model: nn.Module) -> ParameterSpace:
    """Names and shapes of the running means and variances that training changes, in the order of named_buffers.

    Raises UserError for a batch norm that averages over all batches, which depends on how many there have been.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase) or not module.track_running_stats or module.running_mean is None:
            continue
        if module.momentum is None:
            raise UserError(
                f"{path}: batch norm with momentum None counts the batches of all clients; give it a number, as 0.1"
            )
        names |= {f"{path}.{name}".lstrip(".") for name in ("running_mean", "running_var")}
    return ParameterSpace.of((name, value) for name, value in model.named_buffers() if name in names)


@torch.no_grad()
def write_statistics(model: nn.Module, values: torch.Tensor) -> None:
    """Puts running statistics [b], in the order of `statistics`, into a model."""
    own = dict(model.named_buffers())
    for name, value in statistics(model).views(values[None]).items():
        own[name].copy_(value[0])


def batch_norms(model: nn.Module) -> list[str]:
    """The paths of a model's batch norms."""
    return [path for path, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def apply_norm(model: nn.Module, norm: Literal["average", "local", "group"], name: str) -> None:
    """Makes model.norm true for a model called `name`: with `group`, every BatchNorm2d becomes a GroupNorm, in place.

    Raises UserError where the model has no batch norm, or with `group` one that is no BatchNorm2d.
    """
    found = batch_norms(model)
    if norm != "average" and not found:
        raise UserError(f"model.norm={norm}: model '{name}' has no batch norm; leave model.norm out")
    if norm == "group":
        if hasattr(config := getattr(model, "config", None), "norm"):
            config.norm = "group"  # type: ignore[union-attr]
        for path in found:
            model.set_submodule(path, _group_norm(model.get_submodule(path), path, name))


def groups(channels: int) -> int:
    """The number of groups of equal size: GROUPS, or 1 for an odd number of channels."""
    return gcd(GROUPS, channels)


def _group_norm(module: nn.Module, path: str, name: str) -> nn.GroupNorm:
    """A GroupNorm with the scale and shift of the batch norm, see `groups`."""
    if not isinstance(module, nn.BatchNorm2d):
        raise UserError(
            f"model.norm=group: {path} of model '{name}' is a {type(module).__name__}, expected a BatchNorm2d"
        )
    channels = module.num_features
    made = nn.GroupNorm(groups(channels), channels, eps=module.eps, affine=module.affine)
    if module.affine:
        with torch.no_grad():
            made.weight.copy_(module.weight)
            made.bias.copy_(module.bias)
    return made.train(module.training)
