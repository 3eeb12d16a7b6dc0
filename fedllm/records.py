"""What a run writes down: partition.json, start.json, the lines of metrics.jsonl, and result.json."""

from __future__ import annotations

import json
import math
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedllm import __version__
from fedllm.assemble import Job
from fedllm.costs import client_memory, simulated_seconds, stored_values, vectors_per_round
from fedllm.crew import Crew
from fedllm.errors import RunError
from fedllm.metrics import evaluate_logits, metric_for
from fedllm.quantised import frozen_size
from fedllm.results import COSTS, LOSS, outcome, round_to, totals
from fedllm.rounds import Federation, RoundReport


def round_line(job: Job, round: int, report: RoundReport, seconds: float) -> dict[str, Any]:
    """The round's object in metrics.jsonl, before evaluation."""
    srt = simulated_seconds(report.compute_seconds, report.client_bytes, job.recipe.costs.bandwidth_mbit)
    return {
        "round": round,
        "train_loss": report.train_loss,
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "seconds": round_to(seconds),
        "simulated_seconds": round_to(srt),
        "clients": report.clients,
        "rejected": {str(client): why for client, why in report.rejected.items()},
        **report.drift,
    }


def evaluate(job: Job, federation: Federation, crew: Crew) -> dict[str, Any]:
    """Scores and loss on the whole validation split, with the seconds they took."""
    began = time.perf_counter()
    x, labels = federation.x, job.validation.labels
    logits = crew.logits(job.problem, x, job.validation)
    if job.task.regression:
        loss = torch.nn.functional.mse_loss(logits[:, 0], labels.float())
    else:
        loss = torch.nn.functional.cross_entropy(logits, labels)
    scores = {LOSS: float(loss), **evaluate_logits(job.task, logits, labels)}
    finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    return {**finite, "eval_seconds": round_to(time.perf_counter() - began)}


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Adds a line to metrics.jsonl."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunError(f"{path} could not be written: {error}; the last checkpoint is intact") from error


def start_costs(job: Job, seconds: float) -> dict[str, float]:
    """start.json: what the pass over the data before round 1 costs, x0 down to, and a gradient up from, each of the N
    clients."""
    if not job.algorithm.needs_full_gradient():
        return dict.fromkeys(COSTS, 0)
    vector = job.problem.initial().nbytes
    sizes = [len(part) for part in job.parts]
    slowest = simulated_seconds(seconds * max(sizes) / sum(sizes), 2 * vector, job.recipe.costs.bandwidth_mbit)
    every = vector * job.info.num_clients
    return {
        "bytes_up": every,
        "bytes_down": every,
        "seconds": round_to(seconds),
        "simulated_seconds": round_to(slowest),
    }


def partition_summary(job: Job) -> dict[str, Any]:
    """partition.json: how many samples each client has (sizes [N]), and of each class (counts [N, classes]); names [N]:
    the value of the column that a client is, where one tells them apart."""
    labels, classes, settings = np.asarray(job.task.train.labels), job.task.label_names, job.recipe.partition
    counts = [np.bincount(labels[part], minlength=len(classes)).tolist() for part in job.parts] if classes else None
    names = None
    if settings.scheme == "by_column" and settings.file is None:
        column = job.task.train.columns[str(settings.column)]
        names = [str(column[part[0]]) for part in job.parts]
    return {"sizes": [len(part) for part in job.parts], "names": names, "classes": list(classes), "counts": counts}


def run_result(
    job: Job, federation: Federation, metrics: list[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """result.json: what came of a run, and what it cost."""
    recipe, info, dim = job.recipe, job.info, job.problem.dim
    metric = metric_for(job.task)
    frozen, frozen_bytes = frozen_size(job.model, dim)
    memory = client_memory(job.algorithm, info, dim, frozen)
    return {
        "status": "finished",
        "algorithm": recipe.algorithm["name"],
        "task": job.task.name,
        "primary": metric.primary,
        **outcome([*metric.names, LOSS], recipe.eval.target, metrics),
        "totals": totals(facts["start"], metrics),
        "trainable_parameters": dim,
        "vectors_per_round": _vectors(job, federation, metrics),
        "client_memory": memory,
        "client_memory_bytes": frozen_bytes + federation.x.itemsize * (sum(memory.values()) - frozen),
        "client_state_bytes": {
            "a_client": 4 * stored_values(job.algorithm, info, dim),
            "all": federation.clients.nbytes(),
        },
        "seed": recipe.run.seed,
        "machine": {
            "device": str(job.machine.device),
            "threads": job.machine.threads,
            "precision": job.machine.precision,
            "cohort": facts["cohort"],
            "stepped_down": facts["stepped_down"],
            "packed": job.problem.layout is not None,
            "pass_tokens": int(job.problem.pass_tokens),
            "processes": job.machine.processes,
            "shares": facts["shares"],
        },
        "versions": versions(),
    }


def _vectors(job: Job, federation: Federation, metrics: list[dict[str, Any]]) -> dict[str, float]:
    """V(t) as it was sent: bytes both ways over those of x, a sampled client; derived: without what a client can work
    out from the last x (see costs.vectors_per_round)."""
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in metrics)
    all_, derived = (vectors_per_round(job.algorithm, job.info, job.problem.dim, derive=way) for way in (False, True))
    measured = sent / sum(len(line["clients"]) for line in metrics) / federation.x.nbytes
    return {"sent": measured, "derived": measured - (all_ - derived)}


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    names = ("torch", "transformers", "peft", "accelerate", "datasets", "evaluate", "safetensors")
    return {"fedllm": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
