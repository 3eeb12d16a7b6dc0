"""Images: read once, kept as bytes, normalised and augmented per batch; and what is refused."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_images import CLASSES, SIDE, coloured, encoded, pixels, write_folders, write_parquet

from fedllm.common.errors import UserError
from fedllm.data.known_images import KNOWN_IMAGES
from fedllm.data.loading import Dataset, load_dataset
from fedllm.data.pixels import _augmented
from fedllm.data.settings import DataSettings


def load(**settings: Any) -> Dataset:
    return load_dataset(DataSettings(task="image_classification", **settings))


def table_of(path: Path, values: list[Any], labels: list[Any] | None = None, column: str = "image") -> str:
    pq.write_table(pa.table({column: values, "label": labels or [row % 2 for row in range(len(values))]}), path)
    return str(path)


def png(side: int = 8, shade: int = 0) -> bytes:
    return encoded(np.full((3, side, side), shade, np.uint8))


def test_a_table_and_folders_with_the_same_images_are_the_same_data(tmp_path: Path) -> None:
    images, labels = coloured(12, seed=0)
    table = load(
        train=str(write_parquet(tmp_path / "t.parquet", 12, 0)),
        validation=str(write_parquet(tmp_path / "v.parquet", 6, 1)),
    )
    assert table.classes == tuple(CLASSES)
    assert table.image_size == SIDE
    assert np.array_equal(table.train.images, images)
    assert np.array_equal(table.train.labels, labels)
    write_folders(tmp_path / "own" / "train", 12, 0)
    write_folders(tmp_path / "own" / "validation", 6, 1)
    folders = load(name=str(tmp_path / "own"))
    order = np.argsort(labels, kind="stable")  # folder by folder; 0 to 11 sort as text within a class of four
    found = {image.tobytes(): label for image, label in zip(folders.train.images, folders.train.labels, strict=True)}
    assert found == {images[row].tobytes(): labels[row] for row in order}
    assert len(folders.validation) == 6
    assert folders.train.columns["file"][0].startswith("blue/")


def test_a_csv_may_name_files_beside_it(tmp_path: Path) -> None:
    write_folders(tmp_path, 9, 0)
    lines = [f"{path.relative_to(tmp_path).as_posix()},{path.parent.name}" for path in sorted(tmp_path.glob("*/*.png"))]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *lines]))
    assert load(train=str(tmp_path / "t.csv"), holdout=0.3).train.images.shape == (6, 3, SIDE, SIDE)


def test_equal_images_are_held_out_together_and_subsets_are_drawn(tmp_path: Path) -> None:
    values = [png(shade=shade) for shade in range(20)] * 2
    labels = [shade % 2 for shade in range(20)] * 2
    data = load(train=table_of(tmp_path / "t.parquet", values, labels))
    assert (len(data.train), len(data.validation)) == (32, 8)
    sides = [set(split.contents[0]) for split in (data.train, data.validation)]
    assert not sides[0] & sides[1]
    assert "20 of 40 rows repeat the image of another row" in data.notes[0]
    assert not data.warnings
    fewer = load(train=table_of(tmp_path / "t.parquet", values, labels), max_train=10)
    assert len(fewer.train) == 10
    assert fewer.fingerprint != data.fingerprint
    again = fewer.train.take(np.arange(10))
    assert again.fingerprint() == fewer.train.fingerprint()
    changed = fewer.train.take(np.arange(10))
    changed.images[3, 0, 0, 0] ^= 1
    assert changed.fingerprint() != again.fingerprint()


def test_images_are_resized_and_made_rgb(tmp_path: Path) -> None:
    grey = io.BytesIO()
    Image.new("L", (6, 4), 200).save(grey, "PNG")
    path = table_of(tmp_path / "t.parquet", [png(9, 200), grey.getvalue()])
    other = table_of(tmp_path / "v.parquet", [png(7, 200), png(5, 200)])
    data = load(train=path, validation=other, image_size=5)
    images = np.concatenate([data.train.images, data.validation.images])
    assert images.shape[1:] == (3, 5, 5)
    assert (images == 200).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK", "I;16"])
def test_every_kind_of_pixel_becomes_red_green_and_blue(tmp_path: Path, mode: str) -> None:
    """A dark and a light square. 16 bits keep their high 8: Pillow alone makes white of all above 255."""
    values = []
    for shade in (40, 200):
        made, file = Image.new("L", (4, 4), shade), io.BytesIO()
        if mode == "I;16":
            made = Image.fromarray(np.full((4, 4), 256 * shade + 7, np.uint16))
        elif mode == "1":
            made = Image.new(mode, (4, 4), shade > 100)
        elif mode != "CMYK":
            made = made.convert(mode)
        else:
            made = made.convert("RGB").convert("CMYK")
        made.save(file, "TIFF" if mode == "CMYK" else "PNG")
        values.append(file.getvalue())
    images = load(train=table_of(tmp_path / "t.parquet", values), validation=table_of(tmp_path / "v.parquet", values))
    dark, light = images.train.images.astype(int)
    wanted = (0, 255) if mode == "1" else (40, 200)
    assert images.train.images.shape == (2, 3, 4, 4)
    assert max(abs(dark - wanted[0]).max(), abs(light - wanted[1]).max()) <= 1


def test_pixels_of_32_bits_and_labels_with_fractions_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(file, "TIFF")
    with pytest.raises(UserError, match="row 1, column 'image': found pixels of 32 bits, expected 8 or 16"):
        load(train=table_of(tmp_path / "t.parquet", [file.getvalue()] * 2))
    with pytest.raises(UserError, match=r"data\.label=label: found numbers with fractions, expected the classes"):
        load(train=table_of(tmp_path / "t.parquet", [png(), png(shade=9)], [0.5, 1.5]))


def bomb(side: int = 100_000) -> bytes:
    """A PNG whose header says that it is a square of this side."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([png(), png()[:40]], "row 2, column 'image': is no image that can be read"),
        ([png(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"], "row 2, column 'image': is no image"),
        ([png(), bomb()], "row 2, column 'image': found an image too large to decode, expected at most 50,000,000"),
        ([png(), bomb(7100)], "row 2, column 'image': found an image too large to decode, expected at most 50,000,000"),
        ([png(), png(9)], "row 2, column 'image': found an image of 9 x 9 pixels, but the first has 8 x 8"),
        ([png(), None], "column 'image': 1 of 2 rows has no value, the first is row 2"),
        ([1, 2], "row 1, column 'image': found a value of type int, expected the bytes of an image"),
        (["../secret.png", "a.png"], "row 1, column 'image' (../secret.png): no such image in"),
    ],
)  # fmt: skip
def test_a_bad_image_is_named(tmp_path: Path, values: list[Any], said: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    with pytest.raises(UserError) as error:
        load(train=table_of(tmp_path / "data" / "t.parquet", values))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image": "img"}, "data.image: "),
        ({"label": "image"}, "data.image=image: is the label column as well"),
        ({"text": ["image"]}, "data.text=['image']: found data.task=image_classification"),
        ({"regression": True}, "data.regression=true"),
        ({"image_size": 0}, "data.image_size=0: expected 1 to 1024"),
        ({"task": "classification", "image_size": 8}, "data.image_size=8: is for images"),
        ({"task": "classification", "augment": "standard"}, "data.augment=standard: is for images"),
        ({"train": None, "name": "glue/sst2"}, "data.name=glue/sst2: a data set of texts"),
        ({"train": None, "name": "cifar10", "task": "classification"}, "data.name=cifar10: a data set of images"),
    ],
)
def test_settings_that_do_not_fit_images(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    given = {"task": "image_classification", "train": table_of(tmp_path / "t.parquet", [png()] * 4), **settings}
    with pytest.raises(UserError) as error:
        load_dataset(DataSettings(**given))
    assert said in str(error.value)


def test_a_folder_without_images_and_a_label_outside_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="expected one folder per class with images in it"):
        load(train=str(tmp_path / "empty"))
    hub = tmp_path / "hub" / "datasets" / "cifar10"
    hub.mkdir(parents=True)
    for split, labels in (("train", [0, 9]), ("test", [0, 10])):
        table_of(hub / f"{split}.parquet", [png(), png()], labels, "img")
    settings = DataSettings(task="image_classification", name="cifar10")
    with pytest.raises(UserError, match=r"test.parquet, row 2, column 'label': found 10, expected a class from 0 to 9"):
        load_dataset(settings, str(tmp_path / "hub"))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table_of(tmp_path / "t.parquet", [png(), png()])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"images need Pillow; run: pip install 'fedllm\[vision\]'"):
        load(train=path)


def test_known_data_sets_have_their_classes() -> None:
    assert {name: len({*known.classes}) for name, known in KNOWN_IMAGES.items()} == {
        "cifar10": 10, "cifar100": 100, "tiny-imagenet": 0,
    }  # fmt: skip
    for known in KNOWN_IMAGES.values():
        assert [*known.classes] == sorted(known.classes), "the official ids follow the alphabet"


def hub_table(folder: Path, split: str, columns: dict[str, Any], names: dict[str, list[str]]) -> None:
    """A split as the hub has it: bytes of images, and labels with their names in the schema."""
    import datasets

    kinds = {key: datasets.ClassLabel(names=names[key]) for key in names} | {
        key: datasets.Image() for key in columns if key not in names
    }
    images = {
        key: [{"bytes": each, "path": None} for each in values] for key, values in columns.items() if key not in names
    }
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict({**columns, **images}, datasets.Features(kinds)).to_parquet(folder / f"{split}.parquet")


def test_cifar100_is_read_by_its_fine_labels(tmp_path: Path) -> None:
    fine = sorted(KNOWN_IMAGES["cifar100"].classes)
    for split, labels in (("train", [0, 99, 5]), ("test", [7, 3])):
        columns = {
            "img": [png(shade=label) for label in labels],
            "fine_label": labels,
            "coarse_label": [1] * len(labels),
        }
        names = {"fine_label": fine, "coarse_label": [f"group {number}" for number in range(20)]}
        hub_table(tmp_path / "datasets" / "cifar100", split, columns, names)
    found = load_dataset(DataSettings(task="image_classification", name="cifar100"), str(tmp_path))
    assert (found.train.labels.tolist(), found.validation.labels.tolist()) == ([0, 99, 5], [7, 3])
    assert len(found.classes) == 100


def test_tiny_imagenet_has_the_classes_of_its_files_and_is_scored_on_valid(tmp_path: Path) -> None:
    wordnet = ["n01443537", "n01629819", "n01641577"]
    for split, labels in (("train", [0, 2, 1, 0]), ("valid", [2, 1])):
        columns = {"image": [png(16, shade=label) for label in labels], "label": labels}
        hub_table(tmp_path / "datasets" / "tiny-imagenet", split, columns, {"label": wordnet})
    found = load_dataset(DataSettings(task="image_classification", name="tiny-imagenet"), str(tmp_path))
    assert (found.train.labels.tolist(), found.validation.labels.tolist()) == ([0, 2, 1, 0], [2, 1])
    assert list(found.classes) == wordnet


def test_rows_are_normalised() -> None:
    samples = pixels(4)
    found = samples.rows(torch.tensor([2, 0]))["pixel_values"]
    torch.testing.assert_close(found, samples.images[[2, 0]].float() / 127.5 - 1)
    assert samples.lengths.tolist() == [16] * 4
    assert samples.sizes.tolist() == [1] * 4


def test_augmentation_is_a_function_of_the_key() -> None:
    samples = pixels(6, augment=True)
    index, keys = torch.arange(6), torch.arange(6, dtype=torch.int32) * 7919
    whole = samples.rows(index, keys)["pixel_values"]
    for row in range(6):
        alone = samples.rows(index[row : row + 1], keys[row : row + 1])["pixel_values"][0]
        assert torch.equal(whole[row], alone)
    assert torch.equal(samples.rows(index)["pixel_values"], pixels(6).rows(index, keys)["pixel_values"])


def test_augmentation_draws_every_flip_and_shift_evenly() -> None:
    """A 16 x 16 image with one bright pixel shows where it went: 2 flips x 5 shifts down x 5 to the side."""
    image = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    image[..., 6, 4] = 255
    made = _augmented(image.expand(20_000, -1, -1, -1), torch.arange(20_000, dtype=torch.int32))
    places = made[:, 0].flatten(1).argmax(dim=1)
    counts = dict(zip(*[each.tolist() for each in places.unique(return_counts=True)], strict=True))
    expected = {row * 16 + column for row in range(4, 9) for column in (*range(2, 7), *range(9, 14))}
    assert set(counts) == expected
    assert all(abs(count - 400) < 100 for count in counts.values()), "five standard deviations of 20"


def test_images_are_resized_for_the_model() -> None:
    samples = pixels(2)
    larger = type(samples)(**{**vars(samples), "size": 32})
    assert larger.rows(torch.arange(2))["pixel_values"].shape == (2, 3, 32, 32)
