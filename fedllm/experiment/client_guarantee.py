"""What client-level privacy guarantees in a run, and what the run says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedllm.aggregation.accounting import accountant
from fedllm.aggregation.privacy import noise_length
from fedllm.aggregation.privacy_checks import require_bounded
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.experiment.guarantee import bounds, budget_row
from fedllm.experiment.privacy import client_level, mechanism, sampling_rate, spent

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


@dataclass(frozen=True)
class ClientGuarantee:
    """Privacy of all that a client holds, against who sees what the server releases. job: with a settled recipe."""

    job: Job
    privacy: PrivacySettings

    def last_round(self) -> int:
        recipe, privacy = self.job.recipe, self.privacy
        total, one = recipe.federation.rounds, mechanism(recipe, self._clients)
        if one is None or privacy.budget is None or privacy.delta is None:
            return total
        rounds = one.most_times(privacy.budget, privacy.delta, total)
        if rounds == 0:
            raise UserError(
                f"privacy.epsilon: found {privacy.budget:g}, but one round with noise={privacy.noise:g} takes "
                f"{one.epsilon(1, privacy.delta):.3g} at delta={privacy.delta:g}; raise noise or epsilon"
            )
        return rounds

    def warnings(self) -> tuple[str, ...]:
        privacy, clients, found = self.privacy, self._clients, []
        if privacy.delta is not None and privacy.delta >= 1 / clients:
            found.append(
                f"privacy.delta={privacy.delta:g} is not below 1/{clients}, one over the number of clients: all that "
                f"one of them sends could be published, and the guarantee would hold; take {clients**-1.1:.1e} or less"
            )
        if privacy.noise == 0:
            found.append("privacy.noise=0: uploads are clipped and no noise is added, so nobody is protected")
        return tuple(found)

    def rows(self) -> dict[str, str]:
        job, privacy = self.job, self.privacy
        assert privacy.noise is not None
        epsilon = spent(job.recipe, self._clients, job.last_round)
        shown = "no guarantee" if epsilon is None else f"epsilon {epsilon:.4g} at delta {privacy.delta:.3g}"
        return {
            "privacy": f"of a client: {shown} after {job.last_round} rounds; noise {privacy.noise:.4g}, neighbours: "
            f"add or remove one client, accountant: {self._accountant()}",
            "sampling": self._sampling(),
            "noise in the means": "; ".join(_lengths(job, privacy.noise)),
            **budget_row(job, privacy),
        }

    def entries(self, rounds: int) -> dict[str, float | None]:
        return {"epsilon": spent(self.job.recipe, self._clients, rounds)}

    def result(self, rounds: int) -> dict[str, Any]:
        return {
            "level": self.privacy.level,
            **self.entries(rounds),
            "delta": self.privacy.delta,
            "noise": self.privacy.noise,
            "sampling": self.job.recipe.federation.sampling,
            "neighbours": "add or remove one client",
            "accountant": self._accountant(),
            **bounds(self.job, rounds, self.privacy, COVERS, _OPEN, _SEEDED),
        }

    @property
    def _clients(self) -> int:
        return self.job.info.num_clients

    def _accountant(self) -> str:
        return accountant(sampling_rate(self.job.recipe, self._clients)) if self.privacy.noise else "none"

    def _sampling(self) -> str:
        recipe, clients, sampled = self.job.recipe, self._clients, self.job.info.sampled
        if recipe.federation.sampling == "poisson":
            return f"Poisson: each of {clients} clients by itself with probability {sampled / clients:.3g}"
        if sampled == clients:
            return "all clients in every round"
        other = replace(recipe, federation=replace(recipe.federation, sampling="poisson"))
        would = spent(other, clients, self.job.last_round)
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


def client_card(recipe: Recipe, clients: int | None, rounds: int) -> list[list[str]]:
    """The model card's row after so many rounds; none without client-level privacy, or where N is not known."""
    if (privacy := client_level(recipe)) is None or clients is None:
        return []
    epsilon = spent(recipe, clients, rounds)
    if epsilon is None:
        return [["privacy", "uploads were clipped; no noise was added, so there is no guarantee"]]
    text = (
        f"epsilon {epsilon:.3g} at delta {privacy.delta:.2g} for adding or removing one client (noise "
        f"{privacy.noise:.4g}, {recipe.federation.sampling} sampling), against who sees this model. Not covered: the "
        "server, logs of the run, and other runs on the same clients"
    )
    return [["privacy", text]]
