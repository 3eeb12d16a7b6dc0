"""The sections of a recipe that no other package reads: the only description of each of their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import require_positive_settings, setting
from fedllm.tasks.base import require_reachable

MOST_THREADS = 1024
SAMPLED = 10  # clients_per_round where it is not given


@dataclass(frozen=True)
class FederationSettings:
    """The rounds."""

    rounds: int = setting(100, "number of rounds T")
    clients_per_round: int | None = setting(
        None, f"clients sampled each round S; null = {SAMPLED}, or all N where there are fewer"
    )
    tracked_per_round: int | None = setting(None, "sampled clients that send their tracking vector; null = all S")
    sampling: Literal["fixed", "poisson"] = setting(
        "fixed",
        "fixed = exactly S clients each round; poisson = each client by itself with probability S/N, so that S is the "
        "mean, and a round may have none",
    )
    min_clients: int = setting(1, "accepted uploads below which the run stops")
    held_out: float | None = setting(
        None,
        "clients that never train and are evaluated apart: a number, or below 1 a fraction of all; null = none",
    )

    def __post_init__(self) -> None:
        require_positive_settings(self, "rounds", "clients_per_round", "min_clients", "held_out")
        if self.held_out is not None and self.held_out > 1 and self.held_out != int(self.held_out):
            raise UserError(f"held_out: found {self.held_out:g}, expected a whole number of clients, or a fraction")
        if self.clients_per_round is not None and self.min_clients > self.clients_per_round:
            raise UserError(
                f"min_clients: found {self.min_clients}, expected at most clients_per_round={self.clients_per_round}"
            )

    def clients_held_out(self, count: int) -> int:
        """How many of `count` clients never train. Raises UserError, naming the key, where no client would train."""
        if self.held_out is None:
            return 0
        number = int(self.held_out) if self.held_out >= 1 else max(1, round(self.held_out * count))
        if number >= count:
            raise UserError(
                f"federation.held_out: found {self.held_out:g}, which is {number} of {count} clients; expected that at "
                "least one is left to train"
            )
        return number


@dataclass(frozen=True)
class LocalSettings:
    """A client's work in a round."""

    epochs: int | None = setting(None, "passes over the client's data (1 where steps is not given either)")
    steps: int | None = setting(None, "local steps K, instead of epochs; a client with few samples shuffles them again")
    batch_size: int = setting(32, "samples per step; a client with fewer uses all that it has")
    finetune_steps: int | None = setting(
        None,
        "local steps of a copy of the model at each client before its own evaluation (eval.per_client); the copy is "
        "thrown away; null = none",
    )

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise UserError(f"steps: found both epochs={self.epochs} and steps={self.steps}, expected one of them")
        require_positive_settings(self, "epochs", "steps", "batch_size", "finetune_steps")


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation on the whole validation split."""

    every: int = setting(1, "rounds between evaluations; the last round is always evaluated")
    target: dict[str, float] | None = setting(
        None, "metric: value to reach, for rounds-to-target; a loss has to fall to it"
    )
    stop_at_target: bool = setting(False, "end the run when the target is reached")
    metric: str | None = setting(
        None, "score by which a round is the best, of patience and keep_best; null = the headline score"
    )
    patience: int | None = setting(
        None, "end the run after so many evaluations in a row without a better score; null = never"
    )
    keep_best: bool = setting(False, "also keep the checkpoint of the best evaluated round, for `fedllm export --best`")
    start: bool = setting(False, "at the end, also evaluate the model as it was before round 1")
    per_client: float | None = setting(
        None,
        "fraction of its own samples on which each client is evaluated and does not train; the mean, spread, worst and "
        "best tenth of the clients' scores; null = none",
    )
    by: str | None = setting(None, "column of the validation split; at the end, scores for each of its values")
    by_class: bool = setting(
        False, "recall, precision and AUROC of each class, and the confusion matrix, on the validation split at the end"
    )
    samples: int = setting(0, "validation prompts that a language model answers at the end, before and after training")
    new_tokens: int = setting(48, "tokens of such an answer at most")

    def __post_init__(self) -> None:
        require_positive_settings(self, "every", "new_tokens", "patience")
        if self.per_client is not None and not 0 < self.per_client < 1:
            raise UserError(f"per_client: found {self.per_client:g}, expected a fraction between 0 and 1")
        if self.samples < 0:
            raise UserError(f"samples: found {self.samples}, expected 0 or more")
        if self.stop_at_target and not self.target:
            raise UserError("stop_at_target: found true without a target, expected one such as {accuracy: 0.8}")
        require_reachable(self.target or {})


@dataclass(frozen=True)
class RunSettings:
    """How and where the run computes. Only seed and precision change results by more than rounding."""

    seed: int = setting(0, "seed of every draw but the partition's")
    dir: str | None = setting(None, "run folder; null = runs/<recipe>-s<seed>")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto = a GPU where there is one")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "autocast dtype; auto = bfloat16 where it is fast"
    )
    threads: int | None = setting(None, "CPU threads per process; null = its part of the usable cores")
    stacked_clients: int | Literal["auto"] = setting(
        "auto", "clients trained together, in one forward and backward", aliases=("cohort",)
    )
    shares: int | Literal["auto"] = setting(
        "auto", "parts into which the clients of a round are divided by their work; auto = one per process"
    )
    slices: int | Literal["auto"] = setting(
        "auto",
        "auto = several samples packed into each row; a number = padded rows in that many slices, by length",
    )
    gradient_checkpointing: bool = setting(
        False, "store only the inputs of the model's blocks and recompute the rest: less memory, a third more time"
    )
    engine: Literal["fedllm", "flower"] = setting(
        "fedllm",
        "what trains the clients of a simulation: fedllm = this process, together; flower = Flower's simulation engine "
        "on Ray, one client after the other in each of its processes",
    )
    timeout: float = setting(3600.0, "seconds that one process waits for another before the run stops")
    checkpoint_every: int = setting(10, "rounds between checkpoints")
    max_hours: float | None = setting(
        None, "hours after which the command ends, after its round and with a checkpoint; null = no limit"
    )
    resume: Literal["auto", "never"] = setting("auto", "auto = go on from the last good checkpoint in the run folder")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = setting(
        ["tensorboard"], "where the numbers of each round are logged; [] = nowhere"
    )
    local_hub: str | None = setting(None, "folder with models/ and datasets/; null = FEDLLM_LOCAL_HUB")

    def __post_init__(self) -> None:
        require_positive_settings(self, "threads", "stacked_clients", "shares", "slices", "timeout", "checkpoint_every")
        require_positive_settings(self, "max_hours")
        if self.threads and self.threads > MOST_THREADS:
            raise UserError(f"threads: found {self.threads}, expected at most {MOST_THREADS}")


@dataclass(frozen=True)
class CostsSettings:
    """What the simulated run time assumes."""

    bandwidth_mbit: float = setting(100.0, "bandwidth of a client's link, Mbit/s")
    seconds_per_step: float | None = setting(
        None,
        "compute time of one local step in seconds, to simulate another machine; null = measured on this one",
    )

    def __post_init__(self) -> None:
        require_positive_settings(self, "bandwidth_mbit", "seconds_per_step")


@dataclass(frozen=True)
class DeploymentSettings:
    """Real sites, of `fedllm serve`. A simulation ignores all of them but keep_local."""

    sites: int | None = setting(
        None, "number of sites N that may ever take part; null = partition.clients, of scheme by_column"
    )
    start: int | None = setting(None, "sites that must have joined before round 1; null = all")
    deadline: float = setting(600.0, "seconds after which a round goes on without the sites that are missing")
    ask_again: float = setting(300.0, "seconds after which a site that has not answered is asked again")
    patience: float = setting(
        3600.0, "seconds that the server waits on, with too few sites at a round's deadline or before round 1"
    )
    keep_local: Literal["head"] | None = setting(
        None, "head = each client trains a head of its own, which it does not send; the adapters are shared"
    )

    def __post_init__(self) -> None:
        require_positive_settings(self, "sites", "start", "deadline", "ask_again", "patience")
        if self.sites is not None and self.start is not None and self.start > self.sites:
            raise UserError(f"start: found {self.start}, expected at most sites={self.sites}")
