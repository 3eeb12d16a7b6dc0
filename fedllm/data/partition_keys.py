"""The keys of `partition:` that determine a partition, and the name of its file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fedllm.data.settings import PartitionSettings

if TYPE_CHECKING:
    from fedllm.data.loading import Dataset

SHORT = {
    "dirichlet_classes": "dir",
    "dirichlet_clients": "dirc",
    "dirichlet_clusters": "dirk",
    "quantity": "qty",
    "iid": "iid",
    "shards": "shards",
    "by_column": "by_",
}
WITHOUT_LABELS = ("iid", "quantity", "dirichlet_clusters")  # schemes for samples without labels, besides by_column
KEYS = {  # keys of the recipe section, by the scheme that reads them
    "dirichlet_classes": ("clients", "alpha", "seed", "min_size"),
    "dirichlet_clients": ("clients", "alpha", "seed", "min_size"),
    "dirichlet_clusters": ("clients", "alpha", "clusters", "seed", "min_size"),
    "quantity": ("clients", "alpha", "seed", "min_size"),
    "iid": ("clients", "seed", "min_size"),
    "shards": ("clients", "shards_per_client", "seed", "min_size"),
    "by_column": ("clients", "column", "min_size"),
}


def partition_keys(settings: PartitionSettings, dataset: Dataset) -> list[str]:
    """The keys of the recipe section that determine the partition."""
    keys = [*KEYS[settings.scheme]]
    if settings.scheme == "by_column":
        limits = {"max_size": settings.max_size is not None, "drop_small": settings.drop_small}
        keys += [key for key, limited in limits.items() if limited]
        return [*keys, "seed"] if settings.max_size is not None else keys
    return [*keys, "column"] if dataset.groups and "column" not in keys else keys


def partition_name(settings: PartitionSettings, dataset: Dataset) -> str:
    """A file name from the settings that determine the partition, for example "qqp_dir0.1_n100_s0.json"."""
    keys = partition_keys(settings, dataset)
    strength = {
        "alpha": f"{settings.alpha:g}",
        "clusters": f"k{settings.clusters}",
        "max_size": f"max{settings.max_size}",
        "drop_small": "drop",
        "shards_per_client": settings.shards_per_client,
        "column": settings.column,
    }
    told = [str(strength[key]) for key in keys if key in strength]
    scheme = SHORT[settings.scheme] + "_".join(told)
    parts = [dataset.name.removeprefix("glue/"), scheme]
    if "seed" in keys:
        clients = [] if settings.clients is None else [f"n{settings.clients}"]
        parts += [*clients, f"s{settings.seed}"]
    if settings.min_size != 1:
        parts.append(f"m{settings.min_size}")
    return re.sub(r"[^\w.-]+", "-", "_".join(parts)) + ".json"
