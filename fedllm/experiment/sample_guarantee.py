"""What sample-level privacy guarantees in a run, and what the run says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedllm.aggregation.accounting import CLOSED_FORM, accountant
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.config.recipe import Recipe
from fedllm.experiment.guarantee import bounds, budget_row
from fedllm.experiment.sample_privacy import rounds_within_budget, sample_level, spent

if TYPE_CHECKING:
    from fedllm.experiment.job import Job

COVERS = (
    "every training sample of every client: all vectors that clients send, the model and the server's vectors after "
    "every round, and what is computed of them; the server need not be trusted"
)
_OPEN = (
    "train_loss in metrics.jsonl and in a site's answers, which has no noise",
    "the number of samples of each client, which is told, and its classes in partition.json",
    "several samples of one person or one source: epsilon is for one sample; for k of them it is at least k times that",
    "scores on samples that clients hold: answers and scores of real sites' validation splits",
    "several runs on the same samples, such as a search for settings: each run spends its own epsilon",
    "the last digits of the noise, which is computed in floating point",
)
_SEEDED = "whoever knows run.seed, from which a simulation draws its noise and its batches"


@dataclass(frozen=True)
class SampleGuarantee:
    """Privacy of each sample of a client, against all others. job: with a settled recipe."""

    job: Job
    privacy: PrivacySettings

    def last_round(self) -> int:
        return rounds_within_budget(self.job.recipe, self._sizes)

    def warnings(self) -> tuple[str, ...]:
        privacy, found, largest = self.privacy, [], max(self._sizes, default=0)
        if largest and privacy.delta is not None and privacy.delta >= 1 / largest:
            found.append(
                f"privacy.delta={privacy.delta:g} is not below 1/{largest}, one over the number of samples of the "
                "largest client: one of its samples could be published, and the guarantee would hold; take "
                f"{largest**-1.1:.1e} or less"
            )
        if privacy.noise == 0:
            found.append("privacy.noise=0: gradients are clipped and no noise is added, so nobody is protected")
        return tuple(found)

    def rows(self) -> dict[str, str]:
        job, privacy, sizes = self.job, self.privacy, self._sizes
        assert privacy.noise is not None
        assert privacy.clip is not None
        found, batch = spent(job.recipe, sizes, job.last_round), job.recipe.local.batch_size
        if found is not None:
            shown = f"epsilon {found.worst:.4g} of the client with the most, median {found.median:.4g}, at delta "
            shown += f"{privacy.delta:.3g} after {job.last_round} rounds of {job.recipe.local.steps} steps"
        elif privacy.noise and not all(sizes):
            shown = "epsilon depends on a site's samples, and every site prints its own"
        else:
            shown = "no guarantee"
        length = privacy.noise * privacy.clip * math.sqrt(job.problem.dim) / batch
        return {
            "privacy": f"of each sample: {shown}; noise {privacy.noise:.4g}, clip {privacy.clip:g}, neighbours: add or "
            f"remove one sample of one client, accountant: {self._accountant()}",
            "batches": _batches(sizes, batch),
            "noise in a gradient": f"{length:.3g}, {length / privacy.clip:.2g} times the clip, which no gradient's "
            "length without it exceeds",
            **budget_row(job, privacy),
        }

    def entries(self, rounds: int) -> dict[str, float | None]:
        found = spent(self.job.recipe, self._sizes, rounds)
        return {"epsilon": found and found.worst, "epsilon_median": found and found.median}

    def result(self, rounds: int) -> dict[str, Any]:
        return {
            "level": self.privacy.level,
            **self.entries(rounds),
            "delta": self.privacy.delta,
            "noise": self.privacy.noise,
            "clip": self.privacy.clip,
            "sampling": "each sample by itself with probability batch_size / n in each step; that clients are sampled "
            "does not count",
            "neighbours": "add or remove one sample of one client",
            "accountant": self._accountant(),
            **bounds(self.job, rounds, self.privacy, COVERS, _OPEN, _SEEDED),
        }

    @property
    def _sizes(self) -> list[int]:
        """Each client's samples; 0 of a real site, which does not tell."""
        return [len(part) for part in self.job.parts]

    def _accountant(self) -> str:
        if not self.privacy.noise:
            return "none"
        if not all(self._sizes):
            return "of each site"
        small = [size <= self.job.recipe.local.batch_size for size in self._sizes]
        if all(small):
            return CLOSED_FORM
        return accountant(0.0) + (f"; {CLOSED_FORM} where a client takes all samples" if any(small) else "")


def _batches(sizes: Sequence[int], batch_size: int) -> str:
    text = f"Poisson: in each step each sample by itself with probability {batch_size} / n"
    if all(sizes):
        rates = [min(1.0, batch_size / size) for size in sizes]
        text += f", {min(rates):.2g} to {max(rates):.2g}"
    whole = sum(0 < size <= batch_size for size in sizes)
    if whole:
        text += f"; {whole} client{'s' * (whole > 1)} with {batch_size} samples or fewer take{'s' * (whole == 1)} all"
    return text


def sample_card(recipe: Recipe, metrics: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The model card's row; none without sample-level privacy. metrics: the lines up to the card's round."""
    if (privacy := sample_level(recipe)) is None:
        return []
    told = [line for line in metrics if line.get("epsilon") is not None]
    if not told or not privacy.noise:
        return [["privacy", "samples' gradients were clipped; the run tells no epsilon, so there is no guarantee"]]
    text = (
        f"epsilon {told[-1]['epsilon']:.3g} of the client with the most and {told[-1]['epsilon_median']:.3g} of the "
        f"median, at delta {privacy.delta:.2g} after round {told[-1]['round']}, for adding or removing one training "
        f"sample of one client (noise {privacy.noise:.4g}, clip {privacy.clip:g}). Not covered: logs of the run, "
        "several samples of one source, and other runs on the same samples"
    )
    return [["privacy", text]]
