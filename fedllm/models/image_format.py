"""How a model reads images: their side, and how their channels are normalised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from fedllm.common.errors import UserError
from fedllm.common.files import replace_text
from fedllm.data.known_images import Channels
from fedllm.data.pixels import ImageFormat

_FILE = "preprocessor_config.json"
_PATCH = 4  # of models without patches, which then count 64 for an image of 32 x 32
_SIDE = 32
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR, with which data/pixels.py resizes


@dataclass(frozen=True)
class ImageProcessor:
    """How images become the inputs of a model: resized to `side` x `side`, divided by 255, normalised by channel.

    It is written as transformers' image processor, which reads images in the same way.
    """

    side: int
    mean: Channels
    std: Channels

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes preprocessor_config.json."""
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.side, "width": self.side},
            "resample": _BILINEAR,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        replace_text(Path(folder) / _FILE, json.dumps(settings, indent=2) + "\n")


def image_format(model: PreTrainedModel, folder: Path | None) -> ImageFormat:
    """The format of a model's images, from its config and from the image processor's file in `folder`, if there is one.

    Raises UserError for a config whose images are not square or not in three channels, and a file that is not readable.
    """
    config = model.config
    size, patch, channels = (getattr(config, key, None) for key in ("image_size", "patch_size", "num_channels"))
    if channels not in (None, 3):
        raise UserError(f"the model reads images of {channels} channels, expected 3")
    sides = [value if isinstance(value, list | tuple) else [value] for value in (size, patch)]
    if any(len({*values}) > 1 for values in sides):
        raise UserError(f"the model reads images of {size} in patches of {patch}, expected squares")
    (side, *_), (step, *_) = sides
    mean, std = _normalisation(folder)
    return ImageFormat(side, mean, std, patches=((side or _SIDE) // (step or _PATCH)) ** 2)


def _normalisation(folder: Path | None) -> tuple[Channels | None, Channels | None]:
    """Mean and standard deviation in the image processor's file; None and None without one."""
    path = None if folder is None else folder / _FILE
    if path is None or not path.is_file():
        return None, None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        mean, std = (tuple(map(float, values[key])) for key in ("image_mean", "image_std"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable as an image processor's settings ({error!r})") from error
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(
            f"{path}: found image_mean {mean} and image_std {std}, expected three numbers each, std above 0"
        )
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
