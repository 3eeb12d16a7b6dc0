"""What one party of a deployed run reads: a site its own files, the server a validation split or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import ASSISTANT, USER, Conversation, Message
from fedllm.data.known_datasets import KNOWN_DATASETS, label_column, text_columns
from fedllm.data.known_images import image_columns, known_images, reads_images
from fedllm.data.loading import Dataset, encode_tables, table_reader
from fedllm.data.settings import CAUSAL_LM, DataSettings
from fedllm.data.split import Split
from fedllm.data.split_sources import find_file, find_splits
from fedllm.data.tables import Table

_STAND_INS = 2  # samples that stand in for a split that a party does not have


def site_dataset(
    settings: DataSettings,
    train: Path,
    validation: Path | None,
    classes: Sequence[str],
    progress: ProgressCallback | None = None,
) -> Dataset:
    """A site's own files, read as the announced `data:` section says. All training samples are used, none held out.

    classes: the announced ones, () for a regression and for conversations. Raises UserError, naming file, column and
    row, for a file without these columns and for a label that is none of the classes.
    """
    own = _own(settings, train, validation, classes)
    read = table_reader(own)
    files = {"train": train} | ({} if validation is None else {"validation": validation})
    tables: dict[str, Table] = {}
    for role, path in files.items():
        if progress:
            progress(f"reading the {role} split", len(tables), len(files))
        tables[role] = read(path)
    for role, table in tables.items():
        if not len(table):
            raise UserError(f"{files[role]}: has no rows, expected at least one sample")
    found = encode_tables(own, None, tables, None, progress)
    splits = found.splits
    return Dataset(
        name=settings.name or train.stem,
        train=splits["train"],
        validation=splits.get("validation", splits["train"].take(np.arange(1))),
        classes=found.coding.names,
        fingerprint=splits["train"].fingerprint(),
        notes=found.notes,
        warnings=found.coding.doubts,
        stand_ins=frozenset() if validation is not None else frozenset({"validation"}),
    )


def _own(settings: DataSettings, train: Path, validation: Path | None, classes: Sequence[str]) -> DataSettings:
    """The settings with which a site's files are read: without the data set's name, whose columns are then written."""
    own = replace(settings, name=None, train=str(train), validation=None if validation is None else str(validation))
    if settings.task == CAUSAL_LM:
        return own
    if reads_images(settings):
        image, label = image_columns(settings)
        return replace(own, image=image, label=label, classes=list(classes))
    return replace(
        own,
        text=list(text_columns(settings)),
        label=label_column(settings),
        strip=None,
        classes=list(classes) or None,
        regression=None if classes else True,
    )


def server_dataset(
    settings: DataSettings, local_hub: str | None = None, progress: ProgressCallback | None = None
) -> Dataset:
    """The validation split that a recipe names, for a server without training samples; data.train is not read.

    Where it names none, samples that nobody wrote stand in. Raises UserError where the classes are not known without
    training samples.
    """
    known = known_images(settings) or KNOWN_DATASETS.get(settings.name or "")
    table = _validation_table(settings, local_hub, progress)
    settings = _with_classes(settings, None if table is None else table.classes)
    if table is None:
        split, classes = _made_up(settings), settings.classes or (known.classes if known else ())
        names: tuple[str, ...] = tuple(classes)
    else:
        # encode_tables learns classes from "train" alone, and here they are known
        found = encode_tables(settings, known, {"train": table}, None, progress)
        split, names = found.splits["train"], found.coding.names
    return Dataset(
        name=settings.name or Path(str(settings.train or settings.validation or "sites")).stem,
        train=_made_up(settings) if settings.task == CAUSAL_LM else split.take(np.arange(min(len(split), _STAND_INS))),
        validation=split,
        classes=names,
        fingerprint="",
        stand_ins=frozenset({"train"} if table is not None else {"train", "validation"}),
    )


def _validation_table(settings: DataSettings, local_hub: str | None, progress: ProgressCallback | None) -> Table | None:
    """The table of the validation split; None where the recipe names none."""
    read = table_reader(settings)
    if progress:
        progress("reading the validation split", 0, 1)
    if settings.name is None:
        return None if settings.validation is None else read(find_file("data.validation", settings.validation))
    known = known_images(settings) or KNOWN_DATASETS.get(settings.name)
    found = find_splits(settings.name, known, read, local_hub)
    name = settings.validation or (known.validation if known else "validation")
    if settings.validation and name not in found:
        raise UserError(f"data.validation: '{settings.name}' has no split '{name}'; it has: {', '.join(found)}")
    return found[name]() if name in found else None


def _with_classes(settings: DataSettings, declared: dict[str, tuple[str, ...]] | None) -> DataSettings:
    """The settings, with regression=True where neither classes nor a known data set say what the labels are.

    Raises UserError where the classes are not known without training samples."""
    known = known_images(settings) or KNOWN_DATASETS.get(settings.name or "")
    if settings.task == CAUSAL_LM or settings.classes is not None or settings.regression or (known and known.classes):
        return settings
    if known and not reads_images(settings):
        return settings  # a regression
    label = image_columns(settings)[1] if reads_images(settings) else label_column(settings)
    if declared and label in declared:
        return replace(settings, classes=list(declared[label]))
    raise UserError(
        "data.classes: missing; the server has no training samples to learn the classes from: give their names, or "
        "data.regression=true where labels are numbers"
    )


def _made_up(settings: DataSettings) -> Split:
    """Samples that show a model what its input is. They have no meaning."""
    labels, rows = np.zeros(_STAND_INS, np.int64), np.arange(1, _STAND_INS + 1)
    if settings.task == CAUSAL_LM:
        said = [Conversation((Message(USER, text), Message(ASSISTANT, text))) for text in ("a", "a b c d")]
        return Split([], labels, {}, rows, said)
    if reads_images(settings):
        if (side := settings.image_size) is None:
            raise UserError("data.image_size: missing; without a validation split the server knows no image's size")
        ramp = np.arange(_STAND_INS * 3 * side * side, dtype=np.int64) % 251
        return Split([], labels, {}, rows, images=ramp.astype(np.uint8).reshape(_STAND_INS, 3, side, side))
    texts = [["a", "a b c d"] for _ in text_columns(settings)]
    classes = settings.classes or (KNOWN_DATASETS[settings.name].classes if settings.name in KNOWN_DATASETS else ())
    return Split(texts, labels if classes else labels.astype(np.float32), {}, rows)
