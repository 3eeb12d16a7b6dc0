"""The recipe sections `data:` and `partition:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedllm.common.schema import setting


@dataclass(frozen=True)
class DataSettings:
    """The task: a known name, or your own files."""

    title: str | None = setting(None, "the data set's name in reports, any text; does not change results")
    task: Literal["classification", "causal_lm", "image_classification"] = setting(
        "classification", "what is learned: the class or value of a text, a text's next tokens, or an image's class"
    )
    name: str | None = setting(None, "glue/<task>, 20newsgroups, a folder of text files, or package:<module>/<folder>")
    train: str | None = setting(None, "your own training file: CSV, JSON lines or parquet")
    validation: str | None = setting(None, "your own validation file; without one, `holdout` of train is held out")
    text: list[str] | None = setting(None, "columns of the text, one or two, of your own files")
    label: str | None = setting(None, "column of the label of your own files")
    regression: bool | None = setting(None, "labels are numbers, not classes; null = where they are not all whole")
    strip: list[Literal["headers", "footers", "quotes"]] | None = setting(
        None, "parts removed from the messages of 20newsgroups; [] = none, null = all three"
    )
    image: str | None = setting(None, "column of the image of your own files, of data.task=image_classification")
    image_size: int | None = setting(
        None, "side in pixels of the square images that are kept; null = their own, where all are equal"
    )
    augment: Literal["none", "standard"] = setting(
        "none", "standard = images of local steps are flipped and cropped at random, never those of an evaluation"
    )
    max_length: int = setting(128, "tokens beyond this are cut")
    holdout: float = setting(0.2, "fraction of train held out where there is no validation split")
    holdout_seed: int = setting(0, "seed of the hold-out")
    max_train: int | None = setting(None, "use at most so many training samples")
    max_validation: int | None = setting(None, "use at most so many validation samples")


CLIENTS = 100  # partition.clients where it is not given


@dataclass(frozen=True)
class PartitionSettings:
    """How the training samples are shared over the clients."""

    scheme: Literal["dirichlet_classes", "dirichlet_clients", "iid", "by_column", "shards"] = setting(
        "dirichlet_classes", "rule of the split"
    )
    alpha: float = setting(0.1, "concentration of the Dirichlet distribution; small = very non-IID")
    clients: int | None = setting(
        None, f"number of clients N; null = {CLIENTS}, or the column's number of values with scheme by_column"
    )
    seed: int = setting(0, "seed of the split, apart from run.seed")
    min_size: int = setting(1, "fewest samples that a client may have")
    column: str | None = setting(None, "column of scheme by_column: one client per value")
    shards_per_client: int = setting(2, "shards per client, of scheme shards")
    file: str | None = setting(None, "a partition file; the other keys of this section are then taken from it")

    def __post_init__(self) -> None:
        if self.clients is None and self.scheme != "by_column":
            object.__setattr__(self, "clients", CLIENTS)

    @property
    def known_clients(self) -> int | None:
        """The number of clients; None where only a column or a partition file tells it."""
        return None if self.file else self.clients
