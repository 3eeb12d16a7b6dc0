"""Values that a run chose or measured itself, not given by its recipe. A resumed run uses the same values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

_EARLIER_NAMES = {"cohort": "stacked_clients"}


@dataclass
class RunFacts:
    """Every checkpoint holds them, as JSON.

    stacked_clients, slices: see the recipe's keys; what memory forced, where it forced it. shares: parts that a round's
    clients are dealt into. threads, precision: of the machine. data: digests, see Job.data. labels: the classes' names.
    start: COSTS of what came before round 1. stepped_down: the rounds in which memory forced something.
    eval_cuts: into how many parts memory forced an evaluation's batches. head: what model.head=auto chose. base: see
    Job.base_digest; None if an earlier version wrote the checkpoint. run, counted: of a deployed run, its name and the
    receipt of each site's last upload that counted, by site; see deployment.server. privacy: the noise and the delta
    that were found for the recipe's epsilon, {} without privacy.
    """

    stacked_clients: int
    slices: int | Literal["auto"]
    threads: int
    precision: str
    data: dict[str, str] = field(default_factory=dict)
    labels: list[str] | None = None
    start: dict[str, float] = field(default_factory=dict)
    shares: int = 1
    stepped_down: list[dict[str, int]] = field(default_factory=list)
    eval_cuts: int = 1
    head: Literal["keep", "new"] = "new"  # earlier versions always drew a new head
    base: str | None = None
    run: str = ""
    counted: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint's manifest holds them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunFacts:
        """From a manifest, also one of an earlier version. Raises TypeError where a fact is missing."""
        named = {_EARLIER_NAMES.get(name, name): value for name, value in values.items()}
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in named.items() if name in known})
