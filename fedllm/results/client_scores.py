"""client_scores.json: each client's scores on its own samples, and how they are spread over the clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict  # pydantic needs this one up to Python 3.11

from fedllm.tasks.base import lower_is_better

FILE = "client_scores.json"
Scores = dict[str, float | None]


class OfClient(TypedDict):
    """A client.

    client: its number, as in metrics.jsonl; those that never train have the numbers after. in_partition: its number in
    the partition, which is another one where clients are held out. name: its value of partition.column, or None.
    samples: those of its own that it is evaluated on. scores: of the global model, or of the client's model where it
    has a head of its own. finetuned: of its copy after local.finetune_steps.
    """

    client: int
    in_partition: int
    name: str | None
    trains: bool
    samples: int
    scores: Scores
    finetuned: NotRequired[Scores]


class Spread(TypedDict):
    """A score over clients. mean: every client counts alike. weighted_mean: each by its samples. std: around `mean`,
    divided by the number of clients. worst_tenth, best_tenth: the means of the tenth of the clients, rounded up, with
    the worst and the best values, as q-FFL and Ditto report them."""

    mean: float | None
    weighted_mean: float | None
    std: float | None
    worst_tenth: float | None
    best_tenth: float | None


def spread(clients: Sequence[OfClient]) -> dict[str, dict[str, Spread]]:
    """{"scores": each score's spread over the clients, "finetuned": the same after fine-tuning, if there was one}."""
    found = {"scores": [each["scores"] for each in clients]}
    if all("finetuned" in each for each in clients):
        found["finetuned"] = [each["finetuned"] for each in clients]
    samples = [each["samples"] for each in clients]
    return {
        kind: {name: spread_of(name, [own[name] for own in scores], samples) for name in scores[0]}
        for kind, scores in found.items()
    }


def spread_of(name: str, values: Sequence[float | None], samples: Sequence[int]) -> Spread:
    """The spread of one score; None everywhere where one of the values is None, a score that was not finite."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Spread(mean=None, weighted_mean=None, std=None, worst_tenth=None, best_tenth=None)
    ranked = sorted(known, reverse=lower_is_better(name))
    tenth = -(-len(ranked) // 10)
    weighted = math.fsum(value * count for value, count in zip(known, samples, strict=True)) / sum(samples)
    return Spread(
        mean=statistics.fmean(known),
        weighted_mean=weighted,
        std=statistics.pstdev(known),
        worst_tenth=statistics.fmean(ranked[:tenth]),
        best_tenth=statistics.fmean(ranked[-tenth:]),
    )
