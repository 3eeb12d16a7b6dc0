"""The records that a run writes: partition.json, start.json, the lines of metrics.jsonl, and result.json."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedllm.common.errors import RunError
from fedllm.experiment.client_samples import count_samples
from fedllm.experiment.job import Job
from fedllm.experiment.privacy import client_level
from fedllm.experiment.recipe_data import grouped_by
from fedllm.experiment.run_facts import RunFacts
from fedllm.federation.costs import client_memory, simulated_seconds, stored_values, vectors_per_round
from fedllm.federation.rounds import RoundReport
from fedllm.federation.state import FederationState
from fedllm.models.quantization import frozen_size
from fedllm.results.format import COSTS, LOSS, outcome, round_to, totals


@dataclass(frozen=True)
class RoundRecord:
    """One round, as a line of metrics.jsonl.

    seconds: of the round, without the evaluation. simulated_seconds: of the slowest client, including its transfer.
    rejected: client -> reason. drift: see drift.measures. scores: the evaluation's scores, loss and seconds; empty in a
    round without an evaluation. missing: see RoundReport; a simulation's line has none. privacy: of client-level
    privacy, clipped and noise_ratio of RoundReport, and epsilon in a round with an evaluation.
    """

    round: int
    train_loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    simulated_seconds: float
    clients: list[int]
    rejected: dict[str, str]
    drift: dict[str, float | None]
    scores: dict[str, Any] = field(default_factory=dict)
    missing: list[int] | None = None
    privacy: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, round: int, report: RoundReport, seconds: float) -> RoundRecord:
        """The record of a round's report, before the evaluation."""
        computing = _compute_seconds(job, report.compute_seconds, report.most_steps)
        simulated = simulated_seconds(computing, report.client_bytes, job.recipe.costs.bandwidth_mbit)
        return cls(
            round=round,
            train_loss=report.train_loss,
            bytes_up=report.bytes_up,
            bytes_down=report.bytes_down,
            seconds=round_to(seconds),
            simulated_seconds=round_to(simulated),
            clients=report.clients,
            rejected={str(client): why for client, why in report.rejected.items()},
            drift=report.drift,
            missing=report.missing,
            privacy=_noised(report) if client_level(job.recipe) else {},
        )

    def line(self) -> dict[str, Any]:
        """The line of metrics.jsonl as a JSON object."""
        apart = ("drift", "scores", "missing", "privacy")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in apart}
        missing = {} if self.missing is None else {"missing": self.missing}
        return {**values, **missing, **self.drift, **self.privacy, **self.scores}


def _noised(report: RoundReport) -> dict[str, Any]:
    clipped = {} if report.clipped is None else {name: round_to(share) for name, share in report.clipped.items()}
    return {"clipped": clipped, "noise_ratio": report.noise_ratio}


def append_line(path: Path, line: dict[str, Any]) -> dict[str, Any]:
    """Appends a line to metrics.jsonl and returns the line."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error}; make room") from error
    return line


def _compute_seconds(job: Job, measured: float, steps: int) -> float:
    """The simulated compute time of the slowest client: costs.seconds_per_step for each step, or as measured."""
    per_step = job.recipe.costs.seconds_per_step
    return measured if per_step is None else per_step * steps


def start_costs(job: Job, seconds: float) -> dict[str, float]:
    """start.json: the costs of the full gradients before round 1. Each of the N clients receives x0 and sends one
    gradient. A batch of it counts as one step for costs.seconds_per_step."""
    if not job.algorithm.needs_full_gradient():
        return dict.fromkeys(COSTS, 0)
    vector = job.problem.initial().nbytes
    sizes = [len(part) for part in job.parts]
    batches = math.ceil(max(sizes) / job.recipe.local.batch_size)
    computing = _compute_seconds(job, seconds * max(sizes) / sum(sizes), batches)
    slowest = simulated_seconds(computing, 2 * vector, job.recipe.costs.bandwidth_mbit)
    every = vector * job.info.num_clients
    return {
        "bytes_up": every,
        "bytes_down": every,
        "seconds": round_to(seconds),
        "simulated_seconds": round_to(slowest),
    }


def partition_summary(job: Job) -> dict[str, Any]:
    """partition.json: the number of samples per client, and per client and class.

    sizes: [N]. counts: [N, classes]. names: [N], the column value of each client; only with scheme by_column.
    column: the column whose values are the classes, for data without labels; else None. data: see Job.data.
    """
    settings, names = job.recipe.partition, None
    elsewhere = "train" in job.dataset.stand_ins  # the samples are at the sites
    if settings.scheme == "by_column" and settings.file is None and not elsewhere:
        column = job.dataset.train.columns[str(settings.column)]
        names = [str(column[part[0]]) for part in job.parts]
    found = None if elsewhere else count_samples(job.dataset, job.task, job.parts)
    return {
        "sizes": [len(part) for part in job.parts],
        "names": names,
        "classes": list(job.task.classes if found is None else found.names),
        "counts": None if found is None else found.counts,
        "column": grouped_by(job.recipe),
        "data": job.data,
    }


def run_result(job: Job, federation: FederationState, metrics: list[dict[str, Any]], facts: RunFacts) -> dict[str, Any]:
    """result.json: the final and best scores of a run, its costs and its machine."""
    recipe, info, dim = job.recipe, job.info, job.problem.dim
    frozen, frozen_bytes = frozen_size(job.model, dim)
    memory = client_memory(job.algorithm, info, dim, frozen)
    if job.problem.buffers is not None:
        memory["running statistics"] = len(job.problem.buffers.initial)
    return {
        "status": "finished",
        "algorithm": recipe.algorithm["name"],
        "task": job.dataset.name,
        "primary": job.task.primary,
        **outcome([*job.task.metric_names, LOSS], recipe.eval.target, metrics),
        "totals": totals(facts.start, metrics),
        "trainable_parameters": dim,
        "vectors_per_round": _vectors(job, federation, metrics),
        "client_vectors": job.algorithm.held_vectors(),
        "client_memory": memory,
        "client_memory_bytes": frozen_bytes + federation.x.itemsize * (sum(memory.values()) - frozen),
        "client_state_bytes": {
            "a_client": 4 * stored_values(job.algorithm, info, dim),
            "all": federation.clients.nbytes(),
        },
        **({} if job.guarantee is None else {"privacy": job.guarantee.result(metrics[-1]["round"])}),
        "seed": recipe.run.seed,
        "machine": {
            "device": str(job.machine.device),
            "threads": job.machine.threads,
            "precision": job.machine.precision,
            "stacked_clients": facts.stacked_clients,
            "cohort": facts.stacked_clients,  # the earlier key of stacked_clients, for programs that read it
            "stepped_down": facts.stepped_down,
            "packed": job.problem.packed,
            "pass_tokens": int(job.problem.pass_tokens),
            "processes": job.machine.processes,
            "shares": facts.shares,
        },
        "versions": versions(),
    }


def _vectors(job: Job, federation: FederationState, metrics: list[dict[str, Any]]) -> dict[str, float]:
    """V(t), the vectors per sampled client and round, as measured.

    sent: bytes in both directions divided by the bytes of x. derived: sent, minus the vectors that can be computed from
    the last x (see costs.vectors_per_round).
    """
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in metrics)
    given, equal = (job.algorithm, job.info, job.problem.dim), job.equal_steps
    all_, derived = (vectors_per_round(*given, derive=way, equal_steps=equal) for way in (False, True))
    measured = sent / sum(len(line["clients"]) for line in metrics) / federation.x.nbytes
    return {"sent": measured, "derived": measured - (all_ - derived)}


def versions() -> dict[str, str]:
    """The versions of the libraries that a result depends on."""
    names = ("fedllm", "torch", "transformers", "peft", "accelerate", "datasets", "evaluate", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
