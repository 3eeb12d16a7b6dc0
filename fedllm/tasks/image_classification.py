"""The class of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedllm.common.console import ProgressCallback
from fedllm.data.known_images import Channels
from fedllm.data.loading import Split
from fedllm.data.pixels import ImageFormat, Pixels
from fedllm.tasks.heads import image_head
from fedllm.tasks.sequence_classification import Classification

_MIDDLE: Channels = (0.5, 0.5, 0.5)
METRIC = "accuracy"


class ImageClassification(Classification):
    """One of C classes per image; the loss is the cross-entropy.

    classes: their C names in the order of their ids. image_size: the side of the kept images in pixels. mean, std: of
    the data's channels, for a model that does not say how it normalises; None for 0.5 and 0.5. augment: whether local
    steps see augmented images.
    """

    def __init__(
        self,
        classes: Sequence[str],
        image_size: int,
        mean: Channels | None = None,
        std: Channels | None = None,
        augment: bool = False,
    ) -> None:
        super().__init__(classes, METRIC)
        self.head = image_head(self.classes, image_size)
        self._mean, self._std, self._augment = mean, std, augment

    def encode(
        self, split: Split, encoder: ImageFormat, max_length: int, progress: ProgressCallback | None = None
    ) -> Pixels:
        assert split.images is not None, "an image task reads images"
        images, targets = torch.from_numpy(split.images), torch.from_numpy(split.labels.copy())
        mean, std = self.normalisation(encoder)
        return Pixels(images, targets, self.side(encoder), mean, std, self._augment, encoder.patches)

    def side(self, encoder: ImageFormat) -> int:
        """The side in pixels of the images that a model reads: its own, else that of the kept images."""
        found = encoder.size or self.head.image_size
        assert found is not None
        return found

    def normalisation(self, encoder: ImageFormat) -> tuple[Channels, Channels]:
        """Mean and standard deviation of the channels: the model's own, else the data's, else 0.5 and 0.5."""
        return encoder.mean or self._mean or _MIDDLE, encoder.std or self._std or _MIDDLE
