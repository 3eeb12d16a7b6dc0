"""The image models that are built by name, with random weights: no file and no hub is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, ViTConfig

from fedllm.models.conv_nets import ConvNetConfig
from fedllm.tasks.heads import Head


def _resnet18(norm: str) -> Callable[..., PreTrainedConfig]:
    return partial(ConvNetConfig, widths=[64, 128, 256, 512], blocks=[2, 2, 2, 2], norm=norm)


def _cnn(**keys: Any) -> PreTrainedConfig:
    return ConvNetConfig(widths=[32, 64], hidden=128, norm="group", **keys)


def _vit_tiny(image_size: int, **keys: Any) -> PreTrainedConfig:
    """FedAdamW paper, App. C: patches of 4, width 192, 6 layers, 3 heads, dropout 0.1, GELU."""
    return ViTConfig(
        image_size=image_size, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
        intermediate_size=768, hidden_dropout_prob=0.1, **keys,
    )  # fmt: skip


BUILT: dict[str, Callable[..., PreTrainedConfig]] = {
    "cnn": _cnn,
    "resnet18": _resnet18("batch"),
    "resnet18_gn": _resnet18("group"),
    "vit_tiny": _vit_tiny,
}
"""Model names -> function that makes the config of the model.

cnn: two convolutions and GroupNorm, 0.15M parameters; for two cores. resnet18: 3x3 stem of stride 1 and no pooling
after it, 11.2M; resnet18_gn with GroupNorm in place of BatchNorm. vit_tiny: 2.7M.
"""


def built_config(name: str, head: Head) -> PreTrainedConfig:
    """The config of the model called `name`, one of BUILT, with a task's head."""
    keys = dict(head.config)
    return BUILT[name](**keys, **({"image_size": head.image_size} if name == "vit_tiny" else {}))


@torch.no_grad()
def start_vit(net: nn.Module) -> None:
    """Xavier's uniform weights for linear layers, zero biases, and sinusoidal positions, from which they are trained.

    FedAdamW paper, App. C.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for name, value in net.named_parameters():
        if name.endswith("position_embeddings"):
            value.copy_(sinusoids(value.shape[1], value.shape[2]))


def sinusoids(positions: int, width: int) -> Tensor:
    """[positions, width]: sine in even and cosine in odd columns (Vaswani et al. 2017, sec. 3.5)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(positions)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
