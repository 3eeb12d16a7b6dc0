"""Draws the partition of the training samples over the clients, or reads it from a partition file and verifies it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedllm.common.errors import UserError
from fedllm.common.schema import build
from fedllm.data.clusters import cluster_ids
from fedllm.data.groups import column_values
from fedllm.data.natural_clients import left_out
from fedllm.data.partition_keys import WITHOUT_LABELS, partition_keys, partition_name
from fedllm.data.partitioning import partition, stratify, summary
from fedllm.data.settings import PartitionSettings

if TYPE_CHECKING:
    from fedllm.data.loading import Dataset

__all__ = [
    "PartitionFile",
    "digest",
    "get_partition",
    "group_column",
    "left_out_notes",
    "partition",
    "partition_name",
    "read_partition",
    "stratify",
    "summary",
    "write_partition",
]

FORMAT = "fedllm-partition-1"
LISTED = 20_000  # with more samples, a file has no lists: the partition is drawn again and its digest compared


def get_partition(settings: PartitionSettings, dataset: Dataset) -> list[np.ndarray]:
    """The training samples of each client by a recipe's `partition:` section: read from its file, or newly drawn."""
    return read_partition(settings.file, dataset) if settings.file else _draw(settings, dataset)


@dataclass(frozen=True)
class PartitionFile:
    """The content of a partition file.

    fingerprint: that of the training split. partition: the recipe section. digest: sha256 of the index lists.
    indices: the index lists, one text of ranges per client ("0-3 7 9-12"), or null above LISTED samples.
    numpy: the numpy version that drew the partition. An error names it if another version draws another partition.
    """

    format: str
    dataset: str
    fingerprint: str
    num_samples: int
    partition: dict[str, Any]
    sizes: list[int]
    digest: str
    numpy: str
    indices: list[str] | None


def write_partition(
    path: str | Path, parts: Sequence[np.ndarray], settings: PartitionSettings, dataset: Dataset
) -> None:
    """Writes `parts`, which `settings` drew for `dataset`, to a partition file. The write is atomic.

    Raises UserError if `settings` names a partition file, because its own settings are then not those of the draw.
    Raises UserError also if `path` is a folder or a file other than a partition file for these samples.
    """
    path = Path(path)
    if settings.file:
        raise UserError(
            f"partition.file={settings.file}: its clients are in it already; to draw others, set it to null"
        )
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected the name of a file to write")
    if path.is_file() and (there := _parse(path)).fingerprint != dataset.fingerprint:
        raise UserError(
            f"{path}: holds the clients of other samples, of '{there.dataset}' as it was then; delete it, or name "
            f"another file with --out"
        )
    content = PartitionFile(
        format=FORMAT,
        dataset=dataset.name,
        fingerprint=dataset.fingerprint,
        num_samples=len(dataset.train),
        partition={key: getattr(settings, key) for key in ("scheme", *partition_keys(settings, dataset))},
        sizes=list(map(len, parts)),
        digest=digest(parts),
        numpy=np.__version__,
        indices=list(map(_to_ranges, parts)) if sum(map(len, parts)) <= LISTED else None,
    )
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in asdict(content).items())
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_partition(path: str | Path, dataset: Dataset) -> list[np.ndarray]:
    """Reads the index lists of a partition file, and verifies their digest and the training split's fingerprint.

    Raises UserError that names the file and the field that is missing, has a wrong type or does not match.
    """
    file = _parse(Path(path))
    _match(path, "format", file.format, FORMAT, "this version of fedllm cannot read it")
    other_data = (
        f"made for '{file.dataset}' as it was then, not for the recipe's '{dataset.name}'; check the keys of data"
    )
    _match(path, "num_samples", file.num_samples, len(dataset.train), other_data)
    _match(path, "fingerprint", file.fingerprint, dataset.fingerprint, other_data)
    if file.indices is None:
        parts = _draw(build(PartitionSettings, file.partition, f"{path}: partition."), dataset)
        altered = (
            f"the file was altered, or numpy {np.__version__} draws otherwise than numpy {file.numpy}, which wrote it"
        )
    else:
        parts = [_from_ranges(path, text, len(dataset.train)) for text in file.indices]
        altered = "the file was altered"
    altered += "; write it again with `fedllm partition`"
    _match(path, "sizes", [len(samples) for samples in parts], file.sizes, altered)
    _match(path, "digest", digest(parts), file.digest, altered)
    return parts


def _draw(settings: PartitionSettings, dataset: Dataset) -> list[np.ndarray]:
    train, column, clusters = dataset.train, None, None
    if settings.scheme == "by_column":
        column = column_values(train, settings.column, dataset.name)
    elif settings.scheme == "dirichlet_clusters":
        clusters = cluster_ids(train, settings.clusters, settings.seed)
    elif train.conversations is not None and settings.scheme not in WITHOUT_LABELS and not dataset.groups:
        raise UserError(
            f"partition.scheme={settings.scheme}: the samples have no labels; expected partition.column, whose values "
            f"take their place, or partition.scheme={', '.join(WITHOUT_LABELS[:-1])} or {WITHOUT_LABELS[-1]}"
        )
    return partition(
        train.labels,
        scheme=settings.scheme,
        clients=settings.clients,
        alpha=settings.alpha,
        seed=settings.seed,
        min_size=settings.min_size,
        max_size=settings.max_size,
        drop_small=settings.drop_small,
        regression=not dataset.classes and train.conversations is None,
        column=column,
        clusters=clusters,
        shards_per_client=settings.shards_per_client,
    )


def left_out_notes(settings: PartitionSettings, dataset: Dataset, parts: Sequence[np.ndarray]) -> list[str]:
    """Messages that say what partition.max_size and drop_small leave out of natural clients; [] where nothing."""
    drawn = settings
    if settings.file is not None:
        drawn = build(PartitionSettings, _parse(Path(settings.file)).partition, f"{settings.file}: partition.")
    if drawn.max_size is None and not drawn.drop_small:
        return []
    return left_out(column_values(dataset.train, drawn.column, dataset.name), parts)


def group_column(settings: PartitionSettings) -> str | None:
    """The column whose values stand in for labels, where data have none: partition.column, or that of the file."""
    if settings.file is None:
        return settings.column
    column = _parse(Path(settings.file)).partition.get("column")
    return None if column is None else str(column)


def _parse(path: Path) -> PartitionFile:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"partition.file={path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not a partition file: {error}") from error
    known = values if isinstance(values, dict) else {}
    if missing := [field.name for field in fields(PartitionFile) if field.name not in known]:
        raise UserError(f"{path}: not a partition file: the field '{missing[0]}' is missing")
    return build(PartitionFile, known, f"{path}: ")


def _match(path: str | Path, field: str, found: Any, expected: Any, why: str) -> None:
    if found != expected:
        raise UserError(f"{path}: {field}: found {_short(found)}, expected {_short(expected)}: {why}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else text[:67] + "..."


def digest(parts: Sequence[np.ndarray]) -> str:
    """sha256 of the clients' index lists, the same on every machine."""
    found = hashlib.sha256()
    for samples in parts:
        found.update(np.array([len(samples)], "<i8").tobytes() + samples.astype("<i8").tobytes())
    return found.hexdigest()


def _to_ranges(samples: np.ndarray) -> str:
    """Sorted indices as text: [0, 1, 2, 5] -> "0-2 5"."""
    runs = np.split(samples, np.flatnonzero(np.diff(samples) > 1) + 1) if len(samples) else []
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _from_ranges(path: str | Path, text: str, n: int) -> np.ndarray:
    samples: list[int] = []
    for word in text.split():
        first, _, last = word.partition("-")
        if not re.fullmatch(r"\d+(-\d+)?", word) or int(last or first) >= n:
            raise UserError(f"{path}: indices: found '{word}', expected indices below {n} such as '7' or '9-12'")
        samples.extend(range(int(first), int(last or first) + 1))
    return np.array(samples, np.int64)
