"""Loads a training and a validation split of texts, conversations or images, by name or from the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.data.conversations.reading import (
    KNOWN_CONVERSATIONS,
    TEXT_COLUMNS,
    named_columns,
    read_conversation_splits,
)
from fedllm.data.hold_out import hold_out, subset
from fedllm.data.image_files import read_image_table
from fedllm.data.image_reading import read_image_splits
from fedllm.data.known_datasets import KNOWN_DATASETS, label_column, text_columns
from fedllm.data.known_images import KnownImages, image_columns, known_images, reads_images
from fedllm.data.labels import Coding, learn_coding
from fedllm.data.review import review
from fedllm.data.row_choice import csv_form, prepared
from fedllm.data.setting_checks import check_settings
from fedllm.data.settings import CAUSAL_LM
from fedllm.data.split import Split as Split
from fedllm.data.split_sources import Known, Reader, pick_splits
from fedllm.data.tables import Table, read_table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings


@dataclass(frozen=True)
class Dataset:
    """The two splits of a data set and the meaning of their labels.

    classes: class names in the order of their ids; () if labels are numbers. fingerprint: that of the training split.
    notes: messages to the user about choices made while reading. warnings: about data that may not be as meant.
    groups: of conversations, the values of the column that stands in for labels, in the order of their ids; else ().
    stand_ins: those of "train" and "validation" that a party of a deployed run does not have. A few samples stand in
    for them, which show a model its input and are neither trained nor scored.
    """

    name: str
    train: Split
    validation: Split
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    stand_ins: frozenset[str] = frozenset()

    @property
    def image_size(self) -> int | None:
        """The side of its images in pixels, None for texts."""
        return None if self.train.images is None else int(self.train.images.shape[-1])


def load_dataset(
    settings: DataSettings,
    local_hub: str | None = None,
    progress: ProgressCallback | None = None,
    *,
    group_column: str | None = None,
) -> Dataset:
    """Loads the data set that a recipe's `data:` section describes, or any object with the same attributes.

    With `name` (a known data set, one of the local or the Hugging Face hub, a folder or a file), `train` and
    `validation` name its splits. Without `name`, `train` and `validation` are files or folders.
    Without a validation split, a random fraction `holdout` of the training split is held out, per class if there are
    classes; rows with the same text stay together. Then max_train and max_validation select uniform random subsets.
    Labels: if settings.classes gives the classes, see labels.encode_as; if the data set declares them, their ids do not
    change. Otherwise, and with `regression`, see labels.learn_coding. Conversations have no labels; the values of
    `group_column` take their place, if it is given.

    Raises UserError that names the file or split and the wrong key, column, row or value.
    """
    check_settings(settings)
    known: Known | None = known_images(settings) or KNOWN_DATASETS.get(settings.name or "")
    tables = _read_tables(settings, known, local_hub, progress)
    read = encode_tables(settings, known, tables, group_column, progress)
    splits, notes, seed = read.splits, list(read.notes), settings.holdout_seed
    if "validation" not in splits:
        splits["train"], splits["validation"], repeats = hold_out(splits["train"], settings.holdout, seed)
        notes += repeats
    train = subset(splits["train"], settings.max_train, seed, "train")
    validation = subset(splits["validation"], settings.max_validation, seed, "validation")
    is_known = known is not None or settings.name in KNOWN_CONVERSATIONS
    doubts = [] if is_known else [*read.coding.doubts, *review(train, validation, read.coding.names)]
    return Dataset(
        name=settings.name or Path(str(settings.train)).stem,
        train=train,
        validation=validation,
        classes=read.coding.names,
        fingerprint=train.fingerprint(),
        notes=tuple(notes),
        warnings=tuple(doubts),
        groups=read.groups,
    )


class EncodedTables(NamedTuple):
    """The splits of some tables by role; how their labels were read; see Dataset for the others."""

    splits: dict[str, Split]
    coding: Coding
    groups: tuple[str, ...]
    notes: tuple[str, ...]


def encode_tables(
    settings: DataSettings,
    known: Known | None,
    tables: dict[str, Table],
    group_column: str | None = None,
    progress: ProgressCallback | None = None,
) -> EncodedTables:
    """The samples of the tables. Classes are learned from the table "train", if nothing declares them."""
    columns = sample_columns(settings)
    tables = {role: prepared(settings, table, *columns) for role, table in tables.items()}
    notes = [note for table in tables.values() for note in table.notes]
    coding, groups = Coding(()), tuple[str, ...]()
    if settings.task == CAUSAL_LM:
        splits, groups, told = read_conversation_splits(settings, tables, group_column)
        notes += told
    elif reads_images(settings):
        coding = _coding(settings, known, tables, image_columns(settings)[1])
        if not coding.names:
            raise UserError(
                f"data.label={image_columns(settings)[1]}: found numbers with fractions, expected the classes of "
                f"images; name another column, or set data.regression=false to take each number for a class"
            )
        splits = read_image_splits(settings, tables, coding, progress)
    else:
        splits, coding = _labelled_splits(settings, known, tables)
    return EncodedTables(splits, coding, groups, tuple(notes))


def _read_tables(
    settings: DataSettings, known: Known | None, local_hub: str | None, progress: ProgressCallback | None
) -> dict[str, Table]:
    """The tables of the "train" split and, unless it is held out of it, of the "validation" split."""
    readers = pick_splits(settings, known, table_reader(settings), local_hub)
    tables: dict[str, Table] = {}
    for role, read in readers.items():
        if progress:
            progress(f"reading the {role} split", len(tables), len(readers))
        tables[role] = read()
    return tables


def sample_columns(settings: DataSettings) -> tuple[tuple[str, ...], str]:
    """The columns of a sample, and that of its label. Conversations are read from columns that their table decides."""
    if settings.task == CAUSAL_LM:
        return (), ""
    if reads_images(settings):
        image, label = image_columns(settings)
        return (image,), label
    return text_columns(settings), label_column(settings)


def table_reader(settings: DataSettings) -> Reader:
    """The function that reads a table with the columns of the settings."""
    text, label = text_columns(settings), label_column(settings)
    if settings.task == CAUSAL_LM:
        text, label = TEXT_COLUMNS + named_columns(settings), ""
    if reads_images(settings):
        image, label = image_columns(settings)
        return partial(read_image_table, image=image, label=label, form=csv_form(settings))
    return partial(read_table, text=text, label=label, form=csv_form(settings))


def _labelled_splits(
    settings: DataSettings, known: Known | None, tables: dict[str, Table]
) -> tuple[dict[str, Split], Coding]:
    text, label = text_columns(settings), label_column(settings)
    assert not isinstance(known, KnownImages), "texts"
    strip = known.strip if known else None
    parts = known.parts if known and settings.strip is None else settings.strip or ()
    texts = {role: [table.texts(column) for column in text] for role, table in tables.items()}
    if strip:
        texts = {role: [strip(column, parts) for column in columns] for role, columns in texts.items()}
    coding = _coding(settings, known, tables, label)
    return {role: _split(table, texts[role], coding, text, label) for role, table in tables.items()}, coding


def _split(table: Table, texts: list[list[str]], coding: Coding, text: Sequence[str], label: str) -> Split:
    return Split(texts, coding.encode(table, label), table.without(*text, label), np.arange(1, len(table) + 1))


def _coding(settings: DataSettings, known: Known | None, tables: dict[str, Table], label: str) -> Coding:
    if settings.classes is not None:
        return Coding(tuple(settings.classes), given=True)
    declared = known.classes if known else tables["train"].classes.get(label)
    if isinstance(known, KnownImages) and not known.classes:
        declared = tables["train"].classes.get(label)
    if declared is None or settings.regression is not None:
        return learn_coding(tables["train"], label, settings.regression)
    for table in tables.values():
        if (names := table.classes.get(label, declared)) != declared:
            raise UserError(
                f"{table.source}, column '{label}': declares the classes {', '.join(names)}, expected "
                f"{', '.join(declared)}"
            )
    return Coding(declared, declared=True)
