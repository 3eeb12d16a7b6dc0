"""Finds the splits of a data set: files of the user, those of a local hub, or of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.common import hub
from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.data.client_folders import read_part
from fedllm.data.conversations.reading import KNOWN_CONVERSATIONS
from fedllm.data.image_files import image_splits, read_image_table
from fedllm.data.known_datasets import KNOWN_DATASETS, KnownDataset
from fedllm.data.known_images import KNOWN_IMAGES, KnownImages
from fedllm.data.tables import READERS, Table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

Reader = Callable[[Path], Table]
Known = KnownDataset | KnownImages
Readers = dict[str, Callable[[], Table]]
"""Split name -> function that reads the split."""


def pick_splits(settings: DataSettings, known: Known | None, read: Reader, local_hub: str | None) -> Readers:
    """The functions that read the "train" split and, unless it is held out of it, the "validation" split."""
    if settings.name is None:
        paths = {"train": settings.train, "validation": settings.validation}
        files = {role: find_file(f"data.{role}", path) for role, path in paths.items() if path}
        if "validation" in files and files["validation"].samefile(files["train"]):
            raise _same_source(settings)
        return {role: partial(read_part, path, read) for role, path in files.items()}
    found = find_splits(settings.name, known, read, local_hub)
    wanted = {"train": settings.train or "train"}
    default = known.validation if known else "validation"
    if settings.validation or default in found:
        wanted["validation"] = settings.validation or default
        if wanted["validation"] == wanted["train"]:
            raise _same_source(settings)
    for role, split in wanted.items():
        if split not in found:
            raise UserError(
                f"data.{role}: '{settings.name}' has no split '{split}'{nearest(split, list(found))}; "
                f"it has: {', '.join(found)}"
            )
    return {role: found[split] for role, split in wanted.items()}


def find_file(key: str, name: str) -> Path:
    """The file or folder that a key of `data:` names."""
    path = hub.find_local("datasets", name)
    if path is None:
        raise UserError(f"{key}={name}: no such file or folder ({Path(name).expanduser().absolute()})")
    return path


def _same_source(settings: DataSettings) -> UserError:
    return UserError(
        f"data.train={settings.train} and data.validation={settings.validation} are the same samples, expected others; "
        f"without data.validation, the fraction data.holdout of the training samples is held out"
    )


def find_splits(name: str, known: Known | None, read: Reader, local_hub: str | None) -> Readers:
    """The splits of a named data set: one per file in its folder, or else the folder or file itself as "train"."""
    if name in KNOWN_CONVERSATIONS:
        return KNOWN_CONVERSATIONS[name]
    path = hub.find_local("datasets", name, local_hub)
    if path is None:
        return _find_hub_splits(name, known, local_hub)
    if isinstance(read, partial) and read.func is read_image_table and (folders := image_splits(path)):
        return {split: partial(read, folder) for split, folder in folders.items()}
    files = sorted(file for file in path.glob("*") if file.suffix.lower() in READERS)
    return {file.stem: partial(read, file) for file in files} or {"train": partial(read, path)}


def _find_hub_splits(name: str, known: Known | None, local_hub: str | None) -> Readers:
    """The splits of `owner/name` or `owner/name/config` in the Hugging Face cache, or else on the hub."""
    import datasets

    parts = name.split("/", 2)
    address = known.hub if known else ("/".join(parts[:2]), *parts[2:])
    try:
        found = datasets.load_dataset(*address)
    except Exception as error:  # the library raises many types; the user gets one error
        cause = str(error).partition("\n")[0] or type(error).__name__
        known_names = [*KNOWN_DATASETS, *KNOWN_CONVERSATIONS, *KNOWN_IMAGES]
        near = "" if name in known_names else nearest(name, known_names)
        raise hub.not_found("datasets", name, local_hub, cause + near) from error

    def read(split: str) -> Table:
        data = found[split]
        classes = {
            key: tuple(kind.names) for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)
        }
        for key, kind in data.features.items():
            if isinstance(kind, datasets.Image):
                data = data.cast_column(key, datasets.Image(decode=False))
        return Table(f"{name}, split '{split}'", data.to_dict(), classes)

    return {split: partial(read, split) for split in found}
