"""What the section `privacy` guarantees in a run, and what the run says of it: one class for each level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fedllm.aggregation.privacy_settings import PrivacySettings

if TYPE_CHECKING:
    from fedllm.experiment.job import Job


class Guarantee(Protocol):
    """The privacy of a run at one level. A run without the section has none."""

    def last_round(self) -> int:
        """The round with which the run ends: all, or the last within privacy.epsilon. Raises UserError for none."""

    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the recipe's numbers."""

    def rows(self) -> dict[str, str]:
        """The plan's rows: what the run spends, what is drawn how, and how long the noise is."""

    def entries(self, rounds: int) -> dict[str, float | None]:
        """What an evaluated line of metrics.jsonl says after so many rounds; None for an infinite epsilon."""

    def result(self, rounds: int) -> dict[str, Any]:
        """The entry `privacy` of result.json after so many rounds."""


def bounds(
    job: Job, rounds: int, privacy: PrivacySettings, covers: str, uncovered: Sequence[str], seeded: str
) -> dict[str, Any]:
    """The end of the entry `privacy`. seeded: what a simulation, whose noise is seeded, does not cover either."""
    simulated = "train" not in job.dataset.stand_ins
    return {
        "budget": privacy.budget,
        "ended_by_budget": job.last_round < job.info.total and rounds >= job.last_round,
        "covers": covers,
        "does_not_cover": [*uncovered, *([seeded] if simulated else [])],
    }


def budget_row(job: Job, privacy: PrivacySettings) -> dict[str, str]:
    """The plan's row of a budget that ends the run."""
    if privacy.budget is None or job.last_round == job.info.total:
        return {}
    ends = f"the run ends after round {job.last_round} of {job.info.total}"
    return {"privacy budget": f"epsilon {privacy.budget:g}: {ends}"}
