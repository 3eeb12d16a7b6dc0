"""Sample-level privacy in a run: its noise, its problem, and epsilon after a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedllm.aggregation import sample_accounting
from fedllm.aggregation.accounting import last_fitting
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.sample_accounting import Spent, Steps
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data.poisson_batches import PoissonBatches
from fedllm.experiment.privacy import settled
from fedllm.federation.sampling import sample
from fedllm.problems.base import Problem
from fedllm.problems.private import PrivateProblem, seeded_noise, system_noise


def sample_level(recipe: Recipe) -> PrivacySettings | None:
    """The recipe's sample-level privacy; None without it."""
    return recipe.privacy if recipe.privacy is not None and recipe.privacy.level == "sample" else None


def private_problem(
    recipe: Recipe, problem: Problem, parts: Sequence[np.ndarray], *, from_system: bool = False
) -> Problem:
    """The problem whose gradients clients train with: private under sample-level privacy, else as it is.

    from_system: batches and noise come from the system's generator, and not from run.seed.
    """
    if (privacy := sample_level(recipe)) is None:
        return problem
    assert privacy.noise is not None
    assert privacy.clip is not None
    seed = recipe.run.seed
    batches = PoissonBatches(parts, recipe.local.batch_size, None if from_system else seed)
    draws = system_noise if from_system else seeded_noise(seed)
    return PrivateProblem(problem, batches, clip=privacy.clip, noise=privacy.noise, draws=draws)


def steps_after(recipe: Recipe, sizes: Sequence[int], rounds: int) -> list[Steps]:
    """What each client has done after these rounds. sizes: its samples. A client that was sampled counts, also where
    its upload was lost."""
    federation, count = recipe.federation, len(sizes)
    assert federation.clients_per_round is not None
    assert recipe.local.steps is not None
    taken = np.zeros(count, dtype=np.int64)
    for round in range(rounds):
        clients, _ = sample(recipe.run.seed, round, count, federation.clients_per_round, 0, federation.sampling)
        taken[clients] += recipe.local.steps
    batches = PoissonBatches([np.empty(size) for size in sizes], recipe.local.batch_size)
    return [Steps(batches.rate(client), int(times)) for client, times in enumerate(taken)]


def require_known_noise(recipe: Recipe) -> None:
    """Raises UserError where noise or delta would follow from samples that a server does not know."""
    if (privacy := sample_level(recipe)) is not None and privacy.epsilon is not None:
        raise UserError(
            f"privacy.epsilon: found {privacy.epsilon:g} with level=sample, expected none for real sites: the server "
            "does not know how many samples they have; give noise and delta, and every site prints its epsilon"
        )


def settle_samples_privacy(recipe: Recipe, parts: Sequence[np.ndarray]) -> Recipe:
    """The recipe with the noise, or the delta, that follows from what it gives. parts: each client's samples.

    A server, which does not know its sites' samples, needs both given; see require_known_noise."""
    if (privacy := sample_level(recipe)) is None or not all(map(len, parts)):
        return recipe
    done = steps_after(recipe, [len(part) for part in parts], recipe.federation.rounds)
    return settled(
        recipe,
        privacy,
        lambda epsilon, delta, progress: sample_accounting.noise_for_all(epsilon, delta, done, progress),
        lambda noise, epsilon: sample_accounting.largest_delta(noise, epsilon, done),
        "1.0e-5",
    )


def spent(recipe: Recipe, sizes: Sequence[int], rounds: int) -> Spent | None:
    """Epsilon after these rounds of a settled recipe; None where it is infinite or the sizes are not known."""
    privacy = sample_level(recipe)
    if privacy is None or not privacy.noise or privacy.delta is None or not all(sizes):
        return None
    return sample_accounting.spent(privacy.noise, privacy.delta, steps_after(recipe, sizes, rounds))


def epsilon_of_site(recipe: Recipe, samples: int) -> tuple[str, ...]:
    """What a real site with that many samples should know; () without sample-level privacy."""
    if (privacy := sample_level(recipe)) is None:
        return ()
    assert privacy.noise is not None
    assert privacy.delta is not None
    assert recipe.local.steps is not None
    rounds = recipe.federation.rounds
    rate = PoissonBatches([np.empty(samples)], recipe.local.batch_size).rate(0)
    steps = Steps(rate, rounds * recipe.local.steps)
    epsilon = sample_accounting.worst(privacy.noise, privacy.delta, [steps])
    return (
        f"privacy: epsilon {epsilon:.4g} at delta {privacy.delta:g} of each of this site's {samples:,} samples, where "
        f"it takes part in all {rounds} rounds; noise and batches come from the system's generator",
    )


def rounds_within_budget(recipe: Recipe, sizes: Sequence[int]) -> int:
    """The rounds after which the run ends: all, or those in which no client exceeds privacy.epsilon."""
    total, privacy = recipe.federation.rounds, sample_level(recipe)
    if privacy is None or privacy.budget is None or not privacy.noise or privacy.delta is None or not all(sizes):
        return total
    noise, delta, budget = privacy.noise, privacy.delta, privacy.budget

    def worst(rounds: int) -> float:
        return sample_accounting.worst(noise, delta, steps_after(recipe, sizes, rounds))

    if worst(total) <= budget:
        return total
    rounds = last_fitting(total, lambda rounds: worst(rounds) <= budget)
    if rounds == 0:
        raise UserError(
            f"privacy.epsilon: found {budget:g}, but one round with noise={noise:g} takes {worst(1):.3g} of a client "
            f"at delta={delta:g}; raise noise or epsilon, or lower local.steps"
        )
    return rounds
