"""Images of a split, kept as bytes; normalised, resized and augmented per batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedllm.common.hashing import mix

if TYPE_CHECKING:
    from fedllm.data.known_images import Channels

# What tells the draws of one image apart, and from those of its dropout.
_FLIP, _DOWN, _RIGHT = 0x3C6EF372, 0x1B56C4E9, 0x7F4A7C15


@dataclass(frozen=True)
class ImageFormat:
    """How a model reads images.

    size: the side of its images in pixels, None for any. mean, std: of the channels that are normalised to 0 and 1,
    None where the model does not say. patches: what an image counts for in memory plans, as tokens do of a text.
    """

    size: int | None
    mean: Channels | None
    std: Channels | None
    patches: int


@dataclass(frozen=True)
class Pixels:
    """n images with their classes; the counterpart of Tokens.

    images: uint8 [n, 3, S, S]. targets: int64 class ids [n]. size: the side that the model reads. mean, std: of the
    channels, in [0, 1]. augment: whether `rows` draws from keys. patches: see ImageFormat.
    """

    images: Tensor
    targets: Tensor
    size: int
    mean: Channels
    std: Channels
    augment: bool
    patches: int

    notes: ClassVar[tuple[str, ...]] = ()  # there is nothing to say of how they were encoded

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> Tensor:
        """The same for every image, int64 [n]: its patches."""
        return torch.full((len(self),), self.patches)

    @property
    def sizes(self) -> Tensor:
        """The targets that a sample's loss is the sum over, int64 [n]: one each."""
        return torch.ones(len(self), dtype=torch.int64)

    def take(self, rows: Tensor) -> Pixels:
        """The images at `rows` [k], in that order."""
        return replace(self, images=self.images[rows], targets=self.targets[rows])

    def to(self, device: torch.device | str) -> Pixels:
        """The same images on `device`."""
        return replace(self, images=self.images.to(device), targets=self.targets.to(device))

    def rows(self, indices: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        """The images `indices` [b] as {"pixel_values": float32 [b, 3, size, size]}, normalised.

        keys [b]: int32, one per image and use of it; where `augment` is set, each image is flipped from left to right
        or not, and shifted by up to an eighth of its side with black at the border (a random crop with padding: 4
        pixels of CIFAR's 32). Both are a function of its key alone. None: as it is.
        """
        images = self.images[indices.to(self.images.device)]
        if self.augment and keys is not None:
            images = _augmented(images, keys.to(images.device))
        values = images.to(torch.float32) / 255
        if values.shape[-1] != self.size:
            values = F.interpolate(values, (self.size, self.size), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(each, device=values.device)[:, None, None] for each in (self.mean, self.std))
        return {"pixel_values": (values - mean) / std}

    def fingerprint(self) -> bytes:
        """Equal for equal input of a model: the images' bytes and all that `rows` does with them, but augmentation."""
        said = f"{self.size} {self.mean} {self.std}"
        return said.encode() + np.ascontiguousarray(self.images.cpu().numpy()).tobytes()


def _augmented(images: Tensor, keys: Tensor) -> Tensor:
    """uint8 [b, 3, S, S], flipped and shifted by draws from keys [b]."""
    side = images.shape[-1]
    reach = side // 8
    places = torch.arange(side, device=images.device)
    down, right = (_below(2 * reach + 1, keys, salt)[:, None] + places for salt in (_DOWN, _RIGHT))  # [b, S]
    right = torch.where((_below(2, keys, _FLIP) == 1)[:, None], right.flip(1), right)
    padded = F.pad(images, (reach, reach, reach, reach))
    samples = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return padded[samples, channels, down[:, None, :, None], right[:, None, None, :]]


def _below(limit: int, keys: Tensor, salt: int) -> Tensor:
    """Draws [b] from 0 to limit - 1."""
    bits = mix(keys + salt).long() & 0xFFFF
    return (bits * limit) >> 16
