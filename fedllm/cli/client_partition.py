"""The command `fedllm partition`: the clients of a recipe, as a partition file and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedllm.common.console import say, say_all, stage
from fedllm.common.errors import UserError
from fedllm.config.own_files import require_own_files
from fedllm.config.recipe import Recipe
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


def write_clients(recipe: Recipe, arguments: argparse.Namespace) -> int:
    """Writes the partition file, and draws the clients if asked. Clients that a partition file has are drawn alone."""
    of_file = recipe.partition.file
    if arguments.draw not in (None, BESIDE):
        _check_picture(arguments.draw)  # before data are read
    require_own_files(recipe)
    with stage(f"reading {recipe.data.name or recipe.data.train}") as progress:
        dataset = read_data(recipe, progress)
    say_all(dataset.notes, dataset.warnings)
    parts = get_partition(recipe.partition, dataset)
    say_all(left_out_notes(recipe.partition, dataset, parts), ())
    path = arguments.out or Path(of_file or Path("partitions") / partition_name(recipe.partition, dataset))
    if of_file is None or arguments.out or arguments.draw is None:
        write_partition(path, parts, recipe.partition, dataset)
    sizes = sorted(map(len, parts))
    say(f"{path}: {len(parts)} clients, {sizes[0]:,} to {sizes[-1]:,} samples, {sum(sizes):,} in all")
    if arguments.draw is not None:
        picture = path.with_suffix(".png") if arguments.draw == BESIDE else arguments.draw
        say(f"drawn in {_draw(recipe, dataset, parts, picture)}")
    return 0


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
