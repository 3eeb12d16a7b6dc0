"""Convolutional networks for small images: ResNet with the stem of CIFAR, and the small network of FedAvg's paper."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from fedllm.common.errors import UserError
from fedllm.models.norms import groups


class ConvNetConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """widths: filters of each stage. blocks: residual blocks of each stage; () for one convolution a stage.

    hidden: width of the layer before the classifier, None for none. norm: batch or group.
    """

    model_type = "fedllm_conv_net"

    widths: list[int] | None = None
    blocks: list[int] | None = None
    hidden: int | None = None
    norm: str = "batch"


class ResidualBlock(nn.Module):
    """ReLU(norm(conv(ReLU(norm(conv(x))))) + shortcut(x)); He et al. 2016, basic block."""

    def __init__(self, inputs: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), _norm(norm, width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, inputs, H, W] -> [b, width, H / stride, W / stride]."""
        found: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return F.relu(found + self.shortcut(x))


class ConvNet(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A classifier of images [b, 3, H, W]; see ConvNetConfig. Its head is `classifier`."""

    config_class = ConvNetConfig
    base_model_prefix = "features"
    main_input_name = "pixel_values"

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__(config)
        widths = list(config.widths or ())
        self.features = _residual(config, widths) if config.blocks else _plain(config, widths)
        self.classifier = nn.Linear(config.hidden or widths[-1], len(config.id2label or ()))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, pixel_values: Tensor, **_: Any) -> ImageClassifierOutputWithNoAttention:
        """pixel_values: [b, 3, H, W]. The output has logits [b, classes]."""
        logits = self.classifier(self.features(pixel_values))
        return ImageClassifierOutputWithNoAttention(logits=logits)

    def _init_weights(self, module: nn.Module) -> None:
        """Kaiming's normal weights for convolutions; all else as torch begins."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _residual(config: ConvNetConfig, widths: list[int]) -> nn.Sequential:
    """A 3x3 stem of stride 1 without pooling, stages that halve the side from the second on, the mean of each map."""
    block = partial(ResidualBlock, norm=config.norm)
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), _norm(config.norm, widths[0]), nn.ReLU()
    ]  # fmt: skip
    inputs = widths[0]
    for stage, (width, count) in enumerate(zip(widths, config.blocks or (), strict=True)):
        for number in range(count):
            layers.append(block(inputs, width, 2 if stage and not number else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _plain(config: ConvNetConfig, widths: list[int]) -> nn.Sequential:
    """Stages of a 3x3 convolution, a norm, ReLU and a maximum over 2x2; then 4x4 means and a hidden layer."""
    layers: list[nn.Module] = []
    for inputs, width in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(inputs, width, 3, 1, 1), _norm(config.norm, width), nn.ReLU(), nn.MaxPool2d(2)]
    assert config.hidden is not None
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * widths[-1], config.hidden), nn.ReLU()
    )


def _norm(kind: str, width: int) -> nn.Module:
    if kind not in ("batch", "group"):
        raise UserError(f"norm: found '{kind}', expected batch or group")
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(groups(width), width)


AutoConfig.register(ConvNetConfig.model_type, ConvNetConfig)
AutoModelForImageClassification.register(ConvNetConfig, ConvNet)
