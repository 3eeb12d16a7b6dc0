"""The clients of a recipe before a run, as a partition file and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedllm.common.console import say, say_all, stage
from fedllm.common.errors import UserError
from fedllm.config.own_files import require_own_files
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.data.groups import column_values, value_name
from fedllm.data.loading import Dataset
from fedllm.data.partition_file import get_partition, left_out_notes, partition_name, write_partition
from fedllm.data.settings import PartitionSettings
from fedllm.experiment.client_samples import count_samples
from fedllm.experiment.recipe_data import grouped_by, read_data
from fedllm.results.run_record import ClientData
from fedllm.tasks.selection import task_of

BESIDE = Path()
"""What --draw stands for without a FILE: a .png file beside the partition file."""


@dataclass(frozen=True)
class ClientPartition:
    """Who holds which samples. parts: the rows of the training split that each client holds. path: the partition file.
    picture: None where none was asked for."""

    parts: list[np.ndarray]
    path: Path
    picture: Path | None


def partition_clients(
    path: str | Path,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    draw: str | Path | None = None,
) -> ClientPartition:
    """Deals out a recipe's training samples and writes who holds which, as `fedllm partition` does.

    path, overrides: see run_recipe. out: the partition file, by default `partitions/<data>_<scheme>.json`. draw: the
    picture, .png, .svg or .pdf. A partition file that the recipe names is drawn, and written again only to `out`.
    Raises UserError for mistakes in the arguments.
    """
    recipe = load_recipe(path, overrides)
    return write_clients(recipe, Path(out) if out else None, Path(draw) if draw else None)


def write_clients(recipe: Recipe, out: Path | None, draw: Path | None) -> ClientPartition:
    """The same for a recipe. draw: BESIDE for a .png beside the partition file."""
    of_file = recipe.partition.file
    if draw not in (None, BESIDE):
        _check_picture(draw)  # before data are read
    require_own_files(recipe)
    with stage(f"reading {recipe.data.name or recipe.data.train}") as progress:
        dataset = read_data(recipe, progress)
    say_all(dataset.notes, dataset.warnings)
    parts = get_partition(recipe.partition, dataset)
    say_all(left_out_notes(recipe.partition, dataset, parts), ())
    path = out or Path(of_file or Path("partitions") / partition_name(recipe.partition, dataset))
    if of_file is None or out or draw is None:
        write_partition(path, parts, recipe.partition, dataset)
    sizes = sorted(map(len, parts))
    say(f"{path}: {len(parts)} clients, {sizes[0]:,} to {sizes[-1]:,} samples, {sum(sizes):,} in all")
    picture = None
    if draw is not None:
        picture = _draw(recipe, dataset, parts, path.with_suffix(".png") if draw == BESIDE else draw)
        say(f"drawn in {picture}")
    return ClientPartition(parts, path, picture)


def _check_picture(path: Path) -> None:
    from fedllm.reporting.style import require_drawable

    if "=" in path.suffix:
        raise UserError(f"--draw {path}: expected the name of a picture; write section.key=value before --draw")
    require_drawable(path)


def _draw(recipe: Recipe, dataset: Dataset, parts: Sequence[np.ndarray], path: Path) -> Path:
    from fedllm.reporting.client_labels import partition_figure
    from fedllm.reporting.style import save

    task = task_of(replace(recipe.data, image_size=dataset.image_size), dataset.classes)
    found = count_samples(dataset, task, parts)
    clients = ClientData(
        sizes=[len(part) for part in parts],
        classes=[] if found is None else list(found.names),
        counts=[] if found is None else found.counts,
        column=grouped_by(recipe),
    )
    section, names = recipe.sections()["partition"], _names(recipe.partition, dataset, parts)
    return save(partition_figure(clients, recipe.data.title or dataset.name, section, names), path)


def _names(settings: PartitionSettings, dataset: Dataset, parts: Sequence[np.ndarray]) -> list[str] | None:
    """The value of partition.column of each client, under scheme by_column."""
    if settings.scheme != "by_column" or settings.file is not None:
        return None
    values = column_values(dataset.train, settings.column, dataset.name)
    return [value_name(values[part[0]]) for part in parts]
