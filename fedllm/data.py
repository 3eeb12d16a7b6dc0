"""Tasks: a training and a validation split of labelled texts, from a data set's name or the user's own files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedllm import hub
from fedllm.errors import UserError
from fedllm.labels import Coding, learn_coding
from fedllm.random import numpy_rng
from fedllm.settings import nearest
from fedllm.tables import READERS, Columns, Table, read_table
from fedllm.tasks import TASKS, KnownTask
from fedllm.tokens import Progress, Tokens, tokenize

if TYPE_CHECKING:
    from fedllm.recipe import Data

__all__ = ["Progress", "Split", "Task", "Tokens", "load_task", "tokenize"]

Reader = Callable[[Path], Table]
Readers = dict[str, Callable[[], Table]]  # split name -> what reads it


@dataclass(frozen=True)
class Split:
    """n labelled examples. texts: one or two columns of n texts. labels: int64 classes or float32 targets [n].

    columns: the table's other columns by name, each of n values (partition.column picks one).
    """

    texts: list[list[str]]
    labels: np.ndarray
    columns: Columns

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Split:
        """The examples at `rows`, in that order."""
        picked = rows.tolist()
        texts = [[column[row] for row in picked] for column in self.texts]
        return Split(texts, self.labels[rows], {k: [v[row] for row in picked] for k, v in self.columns.items()})

    def fingerprint(self) -> str:
        """sha256 of the texts and labels, the same on every machine."""
        digest = hashlib.sha256(f"{len(self)} {len(self.texts)} {self.labels.dtype.kind}".encode())
        for column in self.texts:
            digest.update(np.fromiter(map(len, column), "<i8").tobytes())
            digest.update("".join(column).encode())
        digest.update(self.labels.astype(self.labels.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """Everything training needs to know of its data.

    label_names: the classes in the order of their ids, () for a regression. metric: a key of metrics.METRICS.
    fingerprint: of the training split. notes: what reading changed, for the user to know.
    """

    name: str
    train: Split
    validation: Split
    label_names: tuple[str, ...]
    metric: str
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def regression(self) -> bool:
        """Whether labels are numbers rather than classes."""
        return not self.label_names

    @property
    def num_labels(self) -> int:
        """Outputs of the head: the classes, or 1 for a regression."""
        return len(self.label_names) or 1


def load_task(settings: Data, local_hub: str | None = None, progress: Progress | None = None) -> Task:
    """The task that a recipe's `data:` section, or any object with its attributes, describes.

    `name`: a known task, a data set of the local or the Hugging Face hub, a folder or a file; `train` and `validation`
    then name its splits. Without a name, `train` and `validation` are files or folders.
    Without a validation split, a random fraction `holdout` of the training split is held out, class by class if it has
    classes. max_train and max_validation then keep uniform random subsets.
    Labels: classes that the data set declares keep their ids; for others, and with `regression`, see
    labels.learn_coding.

    Raises UserError naming the file or split and the key, column, row or value that is wrong.
    """
    _check(settings)
    known = TASKS.get(settings.name or "")
    text = tuple(settings.text or (known.text if known else ("text",)))
    label = settings.label or "label"
    readers = _pick_splits(settings, known, partial(read_table, text=text, label=label), local_hub)
    tables: dict[str, Table] = {}
    for role, read in readers.items():
        if progress:
            progress(f"reading the {role} split", len(tables), len(readers))
        tables[role] = read()

    clean = known.clean if known else list
    texts = {role: [clean(table.texts(column)) for column in text] for role, table in tables.items()}
    coding = _coding(settings, known, tables, label)
    splits = {
        role: Split(texts[role], coding.encode(table, label), table.without(*text, label))
        for role, table in tables.items()
    }
    seed = settings.holdout_seed
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], settings.holdout, seed)
    train = _subset(splits["train"], settings.max_train, seed, "train")
    return Task(
        name=settings.name or Path(str(settings.train)).stem,
        train=train,
        validation=_subset(splits["validation"], settings.max_validation, seed, "validation"),
        label_names=coding.names,
        metric=known.metric if known else "accuracy_macro_f1" if coding.names else "pearson_spearman",
        fingerprint=train.fingerprint(),
        notes=tuple(note for table in tables.values() for note in table.notes),
    )


def _coding(settings: Data, known: KnownTask | None, tables: dict[str, Table], label: str) -> Coding:
    declared = known.classes if known else tables["train"].classes.get(label)
    if declared is None or settings.regression is not None:
        return learn_coding(tables["train"], label, settings.regression)
    for table in tables.values():
        if (names := table.classes.get(label, declared)) != declared:
            raise UserError(
                f"{table.source}, column '{label}': declares the classes {', '.join(names)}, expected "
                f"{', '.join(declared)}"
            )
    return Coding(declared, declared=True)


def _check(settings: Data) -> None:
    label = settings.label or "label"
    if not settings.name and not settings.train:
        raise UserError("data: expected `name` (a data set) or `train` (a file or folder), found neither")
    if settings.text is not None and len(settings.text) not in (1, 2):
        raise UserError(f"data.text={settings.text}: expected one or two columns")
    if settings.text and label in settings.text:
        raise UserError(f"data.text={settings.text}: '{label}' is the label column; expected columns of text")
    if settings.regression is not None and settings.name in TASKS:
        raise UserError(f"data.regression={settings.regression}: '{settings.name}' says itself; leave it out")
    if not 0 < settings.holdout < 1:
        raise UserError(f"data.holdout={settings.holdout}: expected a fraction between 0 and 1")
    for key, limit in (("max_train", settings.max_train), ("max_validation", settings.max_validation)):
        if limit is not None and limit < 1:
            raise UserError(f"data.{key}={limit}: expected at least 1, or null for all")


# Where splits come from


def _pick_splits(settings: Data, known: KnownTask | None, read: Reader, local_hub: str | None) -> Readers:
    """What reads the "train" and, unless it is to be held out, the "validation" split."""
    if settings.name is None:
        paths = {"train": settings.train, "validation": settings.validation}
        return {role: _file_reader(f"data.{role}", path, read) for role, path in paths.items() if path}
    found = _find_splits(settings.name, known, read, local_hub)
    wanted = {"train": settings.train or "train"}
    default = known.validation if known else "validation"
    if settings.validation or default in found:
        wanted["validation"] = settings.validation or default
    for role, split in wanted.items():
        if split not in found:
            raise UserError(
                f"data.{role}: '{settings.name}' has no split '{split}'{nearest(split, list(found))}; "
                f"it has: {', '.join(found)}"
            )
    return {role: found[split] for role, split in wanted.items()}


def _file_reader(key: str, name: str, read: Reader) -> Callable[[], Table]:
    path = hub.find_local("datasets", name)
    if path is None:
        raise UserError(f"{key}={name}: no such file or folder ({Path(name).expanduser().absolute()})")
    return partial(read, path)


def _find_splits(name: str, known: KnownTask | None, read: Reader, local_hub: str | None) -> Readers:
    """The splits of a named data set: the files in its folder by name, or else the folder or file itself as "train"."""
    path = hub.find_local("datasets", name, local_hub)
    if path is None:
        return _find_hub_splits(name, known, local_hub)
    files = sorted(file for file in path.glob("*") if file.suffix.lower() in READERS)
    return {file.stem: partial(read, file) for file in files} or {"train": partial(read, path)}


def _find_hub_splits(name: str, known: KnownTask | None, local_hub: str | None) -> Readers:
    """The splits that the Hugging Face cache, or else the hub, has for `owner/name` or `owner/name/config`."""
    import datasets

    parts = name.split("/", 2)
    address = known.hub if known else ("/".join(parts[:2]), *parts[2:])
    try:
        found = datasets.load_dataset(*address)
    except Exception as error:  # whatever the library meets, the user needs one answer
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise hub.not_found("datasets", name, local_hub, cause + nearest(name, list(TASKS))) from error

    def read(split: str) -> Table:
        data = found[split]
        classes = {
            key: tuple(kind.names) for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)
        }
        return Table(f"{name}, split '{split}'", data.to_dict(), classes)

    return {split: partial(read, split) for split in found}


def _hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """The split without, and only, a random `fraction` of its rows: of each class at least one row, and never all."""
    strata = split.labels if split.labels.dtype == np.int64 else np.zeros(len(split), np.int64)
    held = np.zeros(len(split), bool)
    for stratum in np.unique(strata):
        rows = np.flatnonzero(strata == stratum)
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held[numpy_rng(seed, "holdout", int(stratum)).permutation(rows)[:count]] = True
    if not held.any():
        raise UserError(
            f"data.holdout={fraction}: found {len(split)} rows, one of each class, too few to hold any out; "
            f"give data.validation"
        )
    return split.take(np.flatnonzero(~held)), split.take(np.flatnonzero(held))


def _subset(split: Split, limit: int | None, seed: int, role: str) -> Split:
    if limit is None or limit >= len(split):
        return split
    return split.take(np.sort(numpy_rng(seed, f"subset/{role}").choice(len(split), limit, replace=False)))
