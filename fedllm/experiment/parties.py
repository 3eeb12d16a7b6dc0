"""Whose job a recipe is built for: a run that trains all clients, or one party of a deployed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.config.own_files import require_own_files
from fedllm.config.recipe import Recipe
from fedllm.data.loading import Dataset
from fedllm.data.partition_file import get_partition
from fedllm.data.party_data import server_dataset, site_dataset
from fedllm.experiment.build_checks import check_parts
from fedllm.experiment.recipe_data import Parts, read_data, require_samples


class Party(Protocol):
    """Which samples a process reads, and which of them belong to which client.

    trains_all: whether it trains the clients together, and not one or none of them.
    """

    trains_all: bool

    def source(self, recipe: Recipe) -> str:
        """Where the samples come from, for the terminal."""

    def read(self, recipe: Recipe, progress: ProgressCallback) -> Dataset:
        """The data set. Raises UserError, see load_dataset."""

    def parts(self, recipe: Recipe, dataset: Dataset) -> Parts:
        """The training samples of each of the N clients; empty for a client that another process has."""

    def require_samples(self, parts: Parts, recipe: Recipe) -> None:
        """Raises UserError for a client that is left without samples. parts: without samples that were left out."""


class EveryClient:
    """A run that trains all clients: it reads the whole data set and splits it."""

    trains_all = True

    def source(self, recipe: Recipe) -> str:
        return str(recipe.data.name or recipe.data.train)

    def read(self, recipe: Recipe, progress: ProgressCallback) -> Dataset:
        require_own_files(recipe)
        return read_data(recipe, progress)

    def parts(self, recipe: Recipe, dataset: Dataset) -> Parts:
        parts = get_partition(recipe.partition, dataset)
        check_parts(parts, recipe)
        return parts

    def require_samples(self, parts: Parts, recipe: Recipe) -> None:
        require_samples(parts, recipe)


@dataclass(frozen=True)
class ServerOf:
    """The server of a deployed run with `sites` sites: it reads a validation split or nothing, and trains nobody."""

    sites: int
    trains_all = False

    def source(self, recipe: Recipe) -> str:
        return str(recipe.data.name or recipe.data.validation or "nothing")

    def read(self, recipe: Recipe, progress: ProgressCallback) -> Dataset:
        return server_dataset(recipe.data, recipe.run.local_hub, progress)

    def parts(self, recipe: Recipe, dataset: Dataset) -> Parts:
        return [np.empty(0, np.int64)] * self.sites

    def require_samples(self, parts: Parts, recipe: Recipe) -> None:
        """It has none."""


@dataclass(frozen=True)
class OneSite:
    """Site `number` of `sites`: all rows of its training file are its own. classes: the announced ones."""

    number: int
    sites: int
    train: Path
    validation: Path | None
    classes: Sequence[str]
    trains_all = False

    def source(self, recipe: Recipe) -> str:
        return str(self.train)

    def read(self, recipe: Recipe, progress: ProgressCallback) -> Dataset:
        return site_dataset(recipe.data, self.train, self.validation, self.classes, progress)

    def parts(self, recipe: Recipe, dataset: Dataset) -> Parts:
        parts = [np.empty(0, np.int64)] * self.sites
        parts[self.number] = np.arange(len(dataset.train))
        return parts

    def require_samples(self, parts: Parts, recipe: Recipe) -> None:
        if len(parts[self.number]) == 0:
            raise UserError(
                f"{self.train}: no sample has a learned token within data.max_length={recipe.data.max_length} of the "
                f"recipe"
            )
