"""The samples on which each client is evaluated: those that it holds out, and those of clients that never train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data.client_hold_out import draw_held_out, hold_out_own
from fedllm.data.groups import value_name
from fedllm.data.loading import Dataset
from fedllm.data.samples import Samples
from fedllm.experiment.parties import Party

_NAMED = 5  # the most clients that a warning lists


@dataclass(frozen=True)
class OwnParts:
    """The clients' own samples, which nobody trains on.

    samples: of all clients, one after the other. places: where each client's are in them; those of the `training`
    clients that train come first, then those of the clients that never do. numbers: each client's number in the
    partition. names: its value of partition.column under scheme by_column, else None.
    """

    samples: Samples
    places: list[np.ndarray]
    training: int
    numbers: list[int]
    names: list[str] | None

    @property
    def scored(self) -> list[int]:
        """The clients that have own samples."""
        return [client for client, own in enumerate(self.places) if len(own)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Which clients that train have no own samples; () where all have."""
        lacking = [str(client) for client in range(self.training) if not len(self.places[client])]
        if not lacking:
            return ()
        named = ", ".join(lacking[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
        return (
            f"eval.per_client: {len(lacking):,} of {self.training:,} clients hold no sample out and get no score of "
            f"their own: each has one sample, or only samples that other clients have too (clients {named})",
        )

    @property
    def counts(self) -> dict[str, str]:
        """For the plan: the clients' own samples, and those of clients that never train."""
        sizes = [len(own) for own in self.places]
        trained, never = sizes[: self.training], sizes[self.training :]
        found = {"held out by clients": f"{sum(trained):,} samples of {sum(map(bool, trained)):,} clients"}
        found = found if sum(trained) else {}
        return found | ({"never train": f"{len(never):,} clients, scored on {sum(never):,} samples"} if never else {})


def require_all_here(recipe: Recipe, party: Party) -> None:
    """Raises UserError for settings that need all clients' samples at one place, if the party has not all of them."""
    for key, wanted in (
        ("eval.per_client", recipe.eval.per_client),
        ("federation.held_out", recipe.federation.held_out),
    ):
        if wanted is not None and not party.trains_all:
            raise UserError(f"{key}: found {wanted:g}, but the samples are at real sites; leave it out")


def divide(
    recipe: Recipe, dataset: Dataset, parts: Sequence[np.ndarray], train: Samples
) -> tuple[list[np.ndarray], list[np.ndarray], OwnParts | None]:
    """What the clients train on, what clients that never train would train on, and what all are evaluated on.

    parts: each client's training samples, indices into `train` and the data set's training split. None without
    eval.per_client and federation.held_out. A client that never trains is evaluated on all samples that it alone has;
    with local.finetune_steps on a fraction, as the others, since its copy of the model trains on the rest.
    """
    fraction, count, seed = recipe.eval.per_client, len(parts), recipe.data.holdout_seed
    held_out = recipe.federation.clients_held_out(count)
    if fraction is None and not held_out:
        return list(parts), [], None
    unseen = draw_held_out(count, held_out, seed)
    of_unseen = 1.0 if fraction is None or recipe.local.finetune_steps is None else fraction
    fractions = [of_unseen if client in unseen else fraction or 0.0 for client in range(count)]
    kept, held = hold_out_own(dataset.train, parts, fractions, seed)
    seen = [client for client in range(count) if client not in unseen]
    order = [*seen, *unseen]
    rows = np.concatenate([held[client] for client in order])
    if not len(rows):
        raise UserError(_nothing_held(recipe))
    ends = np.cumsum([len(held[client]) for client in order])
    places = [np.arange(end - len(held[client]), end) for client, end in zip(order, ends, strict=True)]
    own = OwnParts(train.take(torch.from_numpy(rows)), places, len(seen), order, _names(recipe, dataset, parts, order))
    return [kept[client] for client in seen], [kept[client] for client in unseen], own


def _nothing_held(recipe: Recipe) -> str:
    key = "federation.held_out" if recipe.eval.per_client is None else "eval.per_client"
    return (
        f"{key}: no client has a sample to be evaluated on: each has one, or only samples that other clients have too; "
        "leave it out"
    )


def _names(recipe: Recipe, dataset: Dataset, parts: Sequence[np.ndarray], order: Sequence[int]) -> list[str] | None:
    settings = recipe.partition
    if settings.scheme != "by_column" or settings.file is not None:
        return None
    column = dataset.train.columns[str(settings.column)]
    return [value_name(column[parts[client][0]]) for client in order]
