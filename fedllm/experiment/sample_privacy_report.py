"""What a run says of sample-level privacy: in its plan, its result, its warnings and its model card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedllm.aggregation.accounting import CLOSED_FORM, accountant
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.config.recipe import Recipe
from fedllm.experiment.privacy import bounds, budget_row
from fedllm.experiment.sample_privacy import epsilon_entries, sample_level, spent

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


def sample_warnings(recipe: Recipe, sizes: Sequence[int]) -> tuple[str, ...]:
    """What a user should know of the recipe's numbers."""
    if (privacy := sample_level(recipe)) is None:
        return ()
    found, largest = [], max(sizes, default=0)
    if largest and privacy.delta is not None and privacy.delta >= 1 / largest:
        found.append(
            f"privacy.delta={privacy.delta:g} is not below 1/{largest}, one over the number of samples of the largest "
            f"client: one of its samples could be published, and the guarantee would hold; take {largest**-1.1:.1e} "
            "or less"
        )
    if privacy.noise == 0:
        found.append("privacy.noise=0: gradients are clipped and no noise is added, so nobody is protected")
    return tuple(found)


def sample_result(job: Job, rounds: int) -> dict[str, Any]:
    """The entry `privacy` of result.json after these rounds; {} without sample-level privacy."""
    if (privacy := sample_level(job.recipe)) is None:
        return {}
    found = {
        "level": privacy.level,
        **epsilon_entries(job, rounds),
        "delta": privacy.delta,
        "noise": privacy.noise,
        "clip": privacy.clip,
        "sampling": "each sample by itself with probability batch_size / n in each step; that clients are sampled "
        "does not count",
        "neighbours": "add or remove one sample of one client",
        "accountant": _accountant(job, privacy),
        **bounds(job, rounds, privacy, COVERS, _OPEN, _SEEDED),
    }
    return {"privacy": found}


def sample_rows(job: Job) -> dict[str, str]:
    """The plan's rows: what the run spends, how samples are drawn, and how long the noise of a step is."""
    recipe, sizes = job.recipe, _sizes(job)
    if (privacy := sample_level(recipe)) is None:
        return {}
    assert privacy.noise is not None
    assert privacy.clip is not None
    last, K = job.last_round, recipe.local.steps
    found = spent(recipe, sizes, last)
    if found is not None:
        shown = f"epsilon {found.worst:.4g} of the client with the most, median {found.median:.4g}, at delta "
        shown += f"{privacy.delta:.3g} after {last} rounds of {K} steps"
    elif privacy.noise and not all(sizes):
        shown = "epsilon depends on a site's samples, and every site prints its own"
    else:
        shown = "no guarantee"
    length = privacy.noise * privacy.clip * math.sqrt(job.problem.dim) / recipe.local.batch_size
    return {
        "privacy": f"of each sample: {shown}; noise {privacy.noise:.4g}, clip {privacy.clip:g}, neighbours: add or "
        f"remove one sample of one client, accountant: {_accountant(job, privacy)}",
        "batches": _batches(sizes, recipe.local.batch_size),
        "noise in a gradient": f"{length:.3g}, {length / privacy.clip:.2g} times the clip, which no gradient's length "
        "without it exceeds",
        **budget_row(job, privacy),
    }


def _batches(sizes: Sequence[int], batch_size: int) -> str:
    text = f"Poisson: in each step each sample by itself with probability {batch_size} / n"
    if all(sizes):
        rates = [min(1.0, batch_size / size) for size in sizes]
        text += f", {min(rates):.2g} to {max(rates):.2g}"
    whole = sum(0 < size <= batch_size for size in sizes)
    if whole:
        text += f"; {whole} client{'s' * (whole > 1)} with {batch_size} samples or fewer take{'s' * (whole == 1)} all"
    return text


def _accountant(job: Job, privacy: PrivacySettings) -> str:
    if not privacy.noise:
        return "none"
    if not all(_sizes(job)):
        return "of each site"
    small = [size <= job.recipe.local.batch_size for size in _sizes(job)]
    if all(small):
        return CLOSED_FORM
    return accountant(0.0) + (f"; {CLOSED_FORM} where a client takes all samples" if any(small) else "")


def _sizes(job: Job) -> list[int]:
    return [len(part) for part in job.parts]


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
