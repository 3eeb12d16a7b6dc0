"""Client-level privacy in a run: its noise, and epsilon after a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from fedllm.aggregation.accounting import SampledGaussian, noise_for
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.common.console import ProgressCallback, stage
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe


def client_level(recipe: Recipe) -> PrivacySettings | None:
    """The recipe's client-level privacy; None without it."""
    return recipe.privacy if recipe.privacy is not None and recipe.privacy.level == "client" else None


def mechanism(recipe: Recipe, clients: int) -> SampledGaussian | None:
    """One round of a settled recipe as its N clients see it; None without client-level privacy."""
    if (privacy := client_level(recipe)) is None or privacy.noise is None:
        return None
    return SampledGaussian(privacy.noise, sampling_rate(recipe, clients))


def sampling_rate(recipe: Recipe, clients: int) -> float:
    """The probability with which a client takes part, as far as it counts: 1 where samples have a fixed size."""
    sampled = recipe.federation.clients_per_round
    assert sampled is not None
    return sampled / clients if recipe.federation.sampling == "poisson" else 1.0


def settle(recipe: Recipe, clients: int) -> Recipe:
    """The recipe with the noise, or the delta, that follows from what it gives. clients: N."""
    if (privacy := client_level(recipe)) is None:
        return recipe
    rate, rounds = sampling_rate(recipe, clients), recipe.federation.rounds
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
