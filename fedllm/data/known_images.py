"""The image data sets known by name: CIFAR-10, CIFAR-100 and Tiny ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedllm.common.errors import UserError
from fedllm.data.known_datasets import KNOWN_DATASETS, label_column

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

IMAGES = "image_classification"
Channels = tuple[float, float, float]
MOST_SIDE = 1024  # pixels of an image that is kept


@dataclass(frozen=True)
class KnownImages:
    """An image data set known by name.

    image, label: its columns. classes: their names in the order of the labels; () where the files declare them. hub:
    arguments of datasets.load_dataset. mean, std: of red, green and blue over the training pixels, in [0, 1].
    """

    image: str
    label: str
    classes: tuple[str, ...]
    hub: tuple[str, ...]
    validation: str
    mean: Channels
    std: Channels


_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""

KNOWN_IMAGES: dict[str, KnownImages] = {
    "cifar10": KnownImages(
        "img", "label", tuple(_CIFAR10.split()), ("uoft-cs/cifar10",), "test",
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": KnownImages(
        "img", "fine_label", tuple(_CIFAR100.split()), ("uoft-cs/cifar100",), "test",
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    ),
    "tiny-imagenet": KnownImages(
        "image", "label", (), ("zh-plus/tiny-imagenet",), "valid", (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    ),
}  # fmt: skip


def reads_images(settings: DataSettings) -> bool:
    """Whether samples are images."""
    return settings.task == IMAGES


def known_images(settings: DataSettings) -> KnownImages | None:
    """The known image data set that a recipe names; None where it names none, or learns something else."""
    return KNOWN_IMAGES.get(settings.name or "") if reads_images(settings) else None


def image_columns(settings: DataSettings) -> tuple[str, str]:
    """The columns of the image and of its label: those given, else the known data set's, else "image" and "label"."""
    known = known_images(settings)
    image = settings.image or (known.image if known else "image")
    return image, settings.label or (known.label if known else label_column(settings))


def check_image_settings(settings: DataSettings) -> None:
    """Raises UserError where data.task and the other keys do not fit together."""
    name = settings.name or ""
    if not reads_images(settings):
        if name in KNOWN_IMAGES:
            raise UserError(
                f"data.name={name}: a data set of images, found data.task={settings.task}, expected {IMAGES}"
            )
        for key, value, none in (
            ("image", settings.image, None),
            ("image_size", settings.image_size, None),
            ("augment", settings.augment, "none"),
        ):
            if value != none:
                raise UserError(
                    f"data.{key}={value}: is for images, found data.task={settings.task}, expected {IMAGES}"
                )
        return
    if name in KNOWN_DATASETS:
        raise UserError(f"data.name={name}: a data set of texts, found data.task={IMAGES}, expected classification")
    if settings.text is not None:
        raise UserError(f"data.text={settings.text}: found data.task={IMAGES}, expected data.image, or no column")
    if settings.regression:
        raise UserError(f"data.regression=true: found data.task={IMAGES}, which has classes; leave it out")
    if settings.image_size is not None and not 1 <= settings.image_size <= MOST_SIDE:
        raise UserError(f"data.image_size={settings.image_size}: expected 1 to {MOST_SIDE} pixels")
    image, label = image_columns(settings)
    if image == label:
        raise UserError(f"data.image={image}: is the label column as well; expected another column")
