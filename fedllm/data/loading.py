"""Loads a training and a validation split of texts, conversations or images, by name or from the user's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedllm.common import hub
from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.common.seeding import numpy_rng
from fedllm.data.conversations.reading import (
    KNOWN_CONVERSATIONS,
    TEXT_COLUMNS,
    named_columns,
    read_conversation_splits,
)
from fedllm.data.conversations.templates import is_template_file, read_template
from fedllm.data.image_files import image_splits, read_image_table
from fedllm.data.image_reading import read_image_splits
from fedllm.data.known_datasets import KNOWN_DATASETS, KnownDataset, label_column, text_columns
from fedllm.data.known_images import (
    KNOWN_IMAGES,
    KnownImages,
    check_image_settings,
    image_columns,
    known_images,
    reads_images,
)
from fedllm.data.labels import Coding, learn_coding
from fedllm.data.repeats import first_with_same_text
from fedllm.data.review import review
from fedllm.data.settings import CAUSAL_LM
from fedllm.data.split import Split as Split
from fedllm.data.tables import READERS, Table, read_table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

Reader = Callable[[Path], Table]
Known = KnownDataset | KnownImages
Readers = dict[str, Callable[[], Table]]  # split name -> function that reads the split


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
    _check(settings)
    known: Known | None = known_images(settings) or KNOWN_DATASETS.get(settings.name or "")
    tables = _read_tables(settings, known, local_hub, progress)
    read = encode_tables(settings, known, tables, group_column, progress)
    splits, notes, seed = read.splits, list(read.notes), settings.holdout_seed
    if "validation" not in splits:
        splits["train"], splits["validation"], repeats = _hold_out(splits["train"], settings.holdout, seed)
        notes += repeats
    train = _subset(splits["train"], settings.max_train, seed, "train")
    validation = _subset(splits["validation"], settings.max_validation, seed, "validation")
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
    notes = [note for table in tables.values() for note in table.notes]
    coding, groups = Coding(()), tuple[str, ...]()
    if settings.task == CAUSAL_LM:
        splits, groups, told = read_conversation_splits(settings, tables, group_column)
        notes += told
    elif reads_images(settings):
        coding = _coding(settings, known, tables, image_columns(settings)[1])
        splits = read_image_splits(settings, tables, coding, progress)
    else:
        splits, coding = _labelled_splits(settings, known, tables)
    return EncodedTables(splits, coding, groups, tuple(notes))


def _read_tables(
    settings: DataSettings, known: Known | None, local_hub: str | None, progress: ProgressCallback | None
) -> dict[str, Table]:
    """The tables of the "train" split and, unless it is held out of it, of the "validation" split."""
    readers = _pick_splits(settings, known, table_reader(settings), local_hub)
    tables: dict[str, Table] = {}
    for role, read in readers.items():
        if progress:
            progress(f"reading the {role} split", len(tables), len(readers))
        tables[role] = read()
    return tables


def table_reader(settings: DataSettings) -> Reader:
    """The function that reads a table with the columns of the settings."""
    text, label = text_columns(settings), label_column(settings)
    if settings.task == CAUSAL_LM:
        text, label = TEXT_COLUMNS + named_columns(settings), ""
    if reads_images(settings):
        image, label = image_columns(settings)
        return partial(read_image_table, image=image, label=label)
    return partial(read_table, text=text, label=label)


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


def _check(settings: DataSettings) -> None:
    label = label_column(settings)
    if not settings.name and not settings.train:
        raise UserError("data: expected `name` (a data set) or `train` (a file or folder), found neither")
    check_image_settings(settings)
    if settings.text is not None and len(settings.text) not in (1, 2):
        raise UserError(f"data.text={settings.text}: expected one or two columns")
    if settings.task != CAUSAL_LM and settings.name in KNOWN_CONVERSATIONS:
        raise UserError(
            f"data.name={settings.name}: conversations, expected data.task={CAUSAL_LM}, found {settings.task}"
        )
    if settings.task == CAUSAL_LM and is_template_file(str(settings.template)):
        read_template(str(settings.template))  # before a model is loaded
    if settings.task != CAUSAL_LM and settings.text and label in settings.text:
        raise UserError(f"data.text={settings.text}: '{label}' is the label column; expected columns of text")
    if settings.regression is not None and settings.name in KNOWN_DATASETS:
        raise UserError(f"data.regression={settings.regression}: '{settings.name}' says itself; leave it out")
    if not 0 < settings.holdout < 1:
        raise UserError(f"data.holdout={settings.holdout}: expected a fraction between 0 and 1")
    known = KNOWN_DATASETS.get(settings.name or "")
    if settings.classes is not None and (declares := known or known_images(settings)) and declares.classes:
        raise UserError(f"data.classes={settings.classes}: '{settings.name}' declares its classes itself; leave it out")
    if settings.task == CAUSAL_LM and known:
        raise UserError(
            f"data.name={settings.name}: labelled texts, expected data.task=classification, found {CAUSAL_LM}"
        )
    if settings.strip is not None and not (known and known.strip):
        named = ", ".join(name for name, each in KNOWN_DATASETS.items() if each.strip)
        raise UserError(
            f"data.strip={settings.strip}: found data set '{settings.name or settings.train}', expected one whose "
            f"texts have known parts: {named}; leave it out"
        )
    for key, limit in (("max_train", settings.max_train), ("max_validation", settings.max_validation)):
        if limit is not None and limit < 1:
            raise UserError(f"data.{key}={limit}: expected at least 1, or null for all")


# Finding the splits


def _pick_splits(settings: DataSettings, known: Known | None, read: Reader, local_hub: str | None) -> Readers:
    """The functions that read the "train" split and, unless it is held out of it, the "validation" split."""
    if settings.name is None:
        paths = {"train": settings.train, "validation": settings.validation}
        files = {role: find_file(f"data.{role}", path) for role, path in paths.items() if path}
        if "validation" in files and files["validation"].samefile(files["train"]):
            raise _same_source(settings)
        return {role: partial(read, path) for role, path in files.items()}
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
        near = nearest(name, [*KNOWN_DATASETS, *KNOWN_CONVERSATIONS, *KNOWN_IMAGES])
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


def _hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split, list[str]]:
    """Splits off a random `fraction` of the samples; returns the remaining rows, the held-out rows and notes.

    Rows with the same text, prompt or image, which may have different labels, are on the same side; they count as the
    first one. Per class or group, at least one remains, and at least one is held out if there are two or more.
    """
    first = first_with_same_text(split.contents)
    distinct = first == np.arange(len(split))
    strata = split.labels if split.labels.dtype == np.int64 else np.zeros(len(split), np.int64)
    held = np.zeros(len(split), bool)
    for stratum in np.unique(strata):
        rows = np.flatnonzero((strata == stratum) & distinct)
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held[numpy_rng(seed, "holdout", int(stratum)).permutation(rows)[:count]] = True
    if not held.any():
        group = "class" if split.conversations is None else "value of partition.column"
        raise UserError(
            f"data.holdout={fraction}: found {len(split)} rows with one {split.kind} per {group}, too few to hold any "
            f"out; give data.validation"
        )
    held, repeats = held[first], int((~distinct).sum())
    kind = split.kind
    note = f"{repeats:,} of {len(split):,} rows repeat the {kind} of another row; the hold-out keeps equal {kind}s "
    note += "together"
    return split.take(np.flatnonzero(~held)), split.take(np.flatnonzero(held)), [note] if repeats else []


def _subset(split: Split, limit: int | None, seed: int, role: str) -> Split:
    if limit is None or limit >= len(split):
        return split
    return split.take(np.sort(numpy_rng(seed, f"subset/{role}").choice(len(split), limit, replace=False)))
