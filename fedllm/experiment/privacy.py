"""What client-level privacy costs in a run: noise for a wanted epsilon, epsilon after a round, what is covered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedllm.aggregation.accounting import SampledGaussian, accountant, noise_for
from fedllm.aggregation.privacy import noise_length
from fedllm.aggregation.privacy_checks import require_bounded
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.common.console import ProgressCallback, stage
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe

if TYPE_CHECKING:
    from fedllm.experiment.job import Job

COVERS = (
    "the model and the server's vectors after every round, and what is computed of them: the weights that are written, "
    "and scores on data that no client holds"
)
_OPEN = (
    "the server: it is trusted, and reads every client's clipped upload before the noise",
    "train_loss, drift, clipped, noise_ratio, rejected and bytes in metrics.jsonl, which have no noise",
    "clients in metrics.jsonl, partition.json and who answers: with Poisson sampling epsilon holds where it stays "
    "secret who took part",
    "several runs on the same clients, such as a search for settings: each run spends its own epsilon",
    "the last digits of the noise, which is computed in floating point",
)
_SEEDED = "whoever knows run.seed, from which a simulation draws its noise and its samples of clients"


def client_level(recipe: Recipe) -> PrivacySettings | None:
    """The recipe's client-level privacy; None without it."""
    return recipe.privacy if recipe.privacy is not None and recipe.privacy.level == "client" else None


def mechanism(recipe: Recipe, clients: int) -> SampledGaussian | None:
    """One round of a settled recipe as its N clients see it; None without client-level privacy."""
    if (privacy := client_level(recipe)) is None or privacy.noise is None:
        return None
    return SampledGaussian(privacy.noise, _rate(recipe, clients))


def _rate(recipe: Recipe, clients: int) -> float:
    """The probability with which a client takes part, as far as it counts: 1 where samples have a fixed size."""
    sampled = recipe.federation.clients_per_round
    assert sampled is not None
    return sampled / clients if recipe.federation.sampling == "poisson" else 1.0


def settle(recipe: Recipe, clients: int) -> Recipe:
    """The recipe with the noise, or the delta, that follows from what it gives. clients: N."""
    if (privacy := client_level(recipe)) is None:
        return recipe
    rate, rounds = _rate(recipe, clients), recipe.federation.rounds
    return settled(
        recipe,
        privacy,
        lambda epsilon, delta, progress: noise_for(epsilon, delta, rate, rounds, progress),
        lambda noise, epsilon: SampledGaussian(noise, rate).delta(rounds, epsilon),
        f"{1 / clients**1.1:.1e}",
        at_once=rate < 1,
    )


def settled(
    recipe: Recipe,
    privacy: PrivacySettings,
    find_noise: Callable[[float, float, ProgressCallback], float],
    find_delta: Callable[[float, float], float],
    example: str,
    *,
    at_once: bool = False,
) -> Recipe:
    """The recipe with the noise, or the delta, that follows from what `privacy` gives; for both levels.

    find_noise(epsilon, delta, progress), find_delta(noise, epsilon): of the whole run. example: a delta to take, for an
    error. at_once: see console.stage. Raises UserError where no delta follows.
    """
    if privacy.noise is None:
        assert privacy.epsilon is not None
        assert privacy.delta is not None
        with stage(f"privacy: the noise for epsilon {privacy.epsilon:g}", at_once=at_once) as progress:
            noise = find_noise(privacy.epsilon, privacy.delta, progress)
        return replace(recipe, privacy=replace(privacy, noise=noise))
    if privacy.delta is None:
        assert privacy.epsilon is not None
        delta = find_delta(privacy.noise, privacy.epsilon)
        if not 0 < delta < 1:
            raise UserError(
                f"privacy.epsilon: found {privacy.epsilon:g} with noise={privacy.noise:g}, for which delta would be "
                f"{delta:g} after {recipe.federation.rounds} rounds; give delta instead of epsilon, such as {example}"
            )
        return replace(recipe, privacy=replace(privacy, delta=delta))
    return recipe


def decided_privacy(recipe: Recipe) -> dict[str, float | None]:
    """What was found for the recipe's epsilon, with which a resumed run goes on: see RunFacts."""
    return {} if (privacy := recipe.privacy) is None else {"noise": privacy.noise, "delta": privacy.delta}


def spent(recipe: Recipe, clients: int, rounds: int) -> float | None:
    """Epsilon after these rounds of a settled recipe; None where it is infinite, and without client-level privacy."""
    one, privacy = mechanism(recipe, clients), client_level(recipe)
    if one is None or privacy is None or privacy.delta is None:
        return None
    found = one.epsilon(rounds, privacy.delta)
    return found if math.isfinite(found) else None


def rounds_within_budget(recipe: Recipe, clients: int) -> int:
    """The rounds after which the run ends: all, or those that privacy.epsilon allows. Raises UserError for none."""
    total, privacy, one = recipe.federation.rounds, client_level(recipe), mechanism(recipe, clients)
    if privacy is None or one is None or privacy.budget is None or privacy.delta is None:
        return total
    rounds = one.most_times(privacy.budget, privacy.delta, total)
    if rounds == 0:
        raise UserError(
            f"privacy.epsilon: found {privacy.budget:g}, but one round with noise={privacy.noise:g} takes "
            f"{one.epsilon(1, privacy.delta):.3g} at delta={privacy.delta:g}; raise noise or epsilon"
        )
    return rounds


def privacy_warnings(recipe: Recipe, clients: int) -> tuple[str, ...]:
    """What a user should know of the recipe's numbers."""
    if (privacy := client_level(recipe)) is None:
        return ()
    found = []
    if privacy.delta is not None and privacy.delta >= 1 / clients:
        found.append(
            f"privacy.delta={privacy.delta:g} is not below 1/{clients}, one over the number of clients: all that one "
            f"of them sends could be published, and the guarantee would hold; take {clients**-1.1:.1e} or less"
        )
    if privacy.noise == 0:
        found.append("privacy.noise=0: uploads are clipped and no noise is added, so nobody is protected")
    return tuple(found)


def privacy_result(job: Job, rounds: int) -> dict[str, Any]:
    """The entry `privacy` of result.json after these rounds; {} without client-level privacy."""
    recipe, clients = job.recipe, job.info.num_clients
    if (privacy := client_level(recipe)) is None:
        return {}
    found = {
        "level": privacy.level,
        "epsilon": spent(recipe, clients, rounds),
        "delta": privacy.delta,
        "noise": privacy.noise,
        "sampling": recipe.federation.sampling,
        "neighbours": "add or remove one client",
        "accountant": _accountant(privacy, _rate(recipe, clients)),
        **bounds(job, rounds, privacy, COVERS, _OPEN, _SEEDED),
    }
    return {"privacy": found}


def bounds(
    job: Job, rounds: int, privacy: PrivacySettings, covers: str, uncovered: Sequence[str], seeded: str
) -> dict[str, Any]:
    """The end of the entry `privacy`, for both levels. seeded: what a simulation, whose noise is seeded, does not cover
    either."""
    simulated = "train" not in job.dataset.stand_ins
    return {
        "budget": privacy.budget,
        "ended_by_budget": job.last_round < job.info.total and rounds >= job.last_round,
        "covers": covers,
        "does_not_cover": [*uncovered, *([seeded] if simulated else [])],
    }


def privacy_rows(job: Job) -> dict[str, str]:
    """The plan's rows: what the run spends, and how long the noise is beside the clip of each vector."""
    recipe, info = job.recipe, job.info
    if (privacy := client_level(recipe)) is None:
        return {}
    assert privacy.noise is not None
    last, rate = job.last_round, _rate(recipe, info.num_clients)
    epsilon = spent(recipe, info.num_clients, last)
    shown = "no guarantee" if epsilon is None else f"epsilon {epsilon:.4g} at delta {privacy.delta:.3g}"
    return {
        "privacy": f"of a client: {shown} after {last} rounds; noise {privacy.noise:.4g}, neighbours: add or "
        f"remove one client, accountant: {_accountant(privacy, rate)}",
        "sampling": _sampling(recipe, info.num_clients, last),
        "noise in the means": "; ".join(_lengths(job, privacy.noise)),
        **budget_row(job, privacy),
    }


def budget_row(job: Job, privacy: PrivacySettings) -> dict[str, str]:
    """The plan's row of a budget that ends the run, for both levels."""
    if privacy.budget is None or job.last_round == job.info.total:
        return {}
    ends = f"the run ends after round {job.last_round} of {job.info.total}"
    return {"privacy budget": f"epsilon {privacy.budget:g}: {ends}"}


def _accountant(privacy: PrivacySettings, rate: float) -> str:
    return accountant(rate) if privacy.noise else "none"


def _sampling(recipe: Recipe, clients: int, rounds: int) -> str:
    federation, privacy = recipe.federation, client_level(recipe)
    sampled = federation.clients_per_round
    assert sampled is not None
    if federation.sampling == "poisson":
        return f"Poisson: each of {clients} clients by itself with probability {sampled / clients:.3g}"
    if sampled == clients:
        return "all clients in every round"
    other = replace(recipe, federation=replace(federation, sampling="poisson"))
    would = spent(other, clients, rounds)
    assert privacy is not None
    gain = "" if would is None else f"; federation.sampling=poisson with this noise: epsilon {would:.4g}"
    return f"fixed, {sampled} of {clients}: epsilon is as if all took part in every round{gain}"


def _lengths(job: Job, noise: float) -> Sequence[str]:
    """The length of the noise in the mean of each vector against its clip, the most that a client's can have.

    Where rounds take turns: in those with the most coordinates."""
    setup, x = job.setup, torch.empty(job.problem.dim)
    if setup.turns:
        most = max(setup.turns, key=lambda turn: len(turn.coordinates))
        setup, x = setup.in_turn(most, x), most.take(x)
    clips, sent = require_bounded(job.algorithm, job.recipe.uploads), setup.declared(x).of_algorithm
    found = []
    for name in sent:
        length = noise_length(noise, clips[name], len(sent), setup.declared(x).sent[name], job.info.sampled)
        found.append(f"{name} {length:.3g}, {length / clips[name]:.2g} times its clip {clips[name]:g}")
    return found
