"""The scores of every client on its own samples, of the global model and of the client's fine-tuned copy of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedllm.common.files import replace_text
from fedllm.experiment.evaluation import finite, outputs_at
from fedllm.experiment.job import Job
from fedllm.experiment.own_outputs import own_outputs
from fedllm.experiment.own_parts import OwnParts
from fedllm.experiment.session import Session
from fedllm.results.client_scores import FILE, OfClient, spread

ENTRY = "per_client"  # the key of metrics.jsonl and result.json


def evaluate_own(session: Session) -> dict[str, Any]:
    """The entry of metrics.jsonl: how the clients' scores are spread, see _entry; {} where clients are not evaluated.

    Rank 0 writes each client's scores to client_scores.json in the run folder, in place of those of earlier rounds."""
    job, state = session.job, session.state
    if (own := job.own) is None:
        return {}
    if job.problem.personal is None:
        outputs = outputs_at(job, state.x, own.samples, session.executor, state.buffers)
    else:
        outputs = own_outputs(session, own, steps=0)
    steps = job.recipe.local.finetune_steps
    tuned = None if steps is None else own_outputs(session, own, steps)
    clients = _of_clients(job, own, outputs, tuned)
    text = json.dumps({"round": state.round, "clients": clients}) + "\n"
    session.executor.on_first(lambda: replace_text(session.folder / FILE, text))
    return {ENTRY: _entry(clients)}


def settle_own(session: Session) -> dict[str, Any]:
    """The entry of result.json: that of the last evaluation. client_scores.json is written again where it is missing or
    of another round, as after a checkpoint that was taken up before it."""
    if session.job.own is None:
        return {}
    last = next(line for line in reversed(session.metrics) if ENTRY in line)
    if session.executor.on_first(lambda: _round_of(session.folder / FILE)) != last["round"]:
        evaluate_own(session)
    return {ENTRY: last[ENTRY]}


def _of_clients(job: Job, own: OwnParts, outputs: Tensor, tuned: Tensor | None) -> list[OfClient]:
    places, targets = [own.places[client] for client in own.scored], own.samples.targets.cpu()
    scores = job.task.evaluate_parts(outputs, targets, places)
    found: list[OfClient] = [
        {
            "client": client,
            "in_partition": own.numbers[client],
            "name": None if own.names is None else own.names[client],
            "trains": client < own.training,
            "samples": len(own.places[client]),
            "scores": finite(of_client),
        }
        for client, of_client in zip(own.scored, scores, strict=True)
    ]
    if tuned is not None:
        for each, of_client in zip(found, job.task.evaluate_parts(tuned, targets, places), strict=True):
            each["finetuned"] = finite(of_client)
    return found


def _entry(clients: Sequence[OfClient]) -> dict[str, Any]:
    """Of the clients that train, and of those that never do, where there are any: their number, their samples, and the
    spread of each score over them, see results.client_scores.spread."""
    groups = {
        "training": [each for each in clients if each["trains"]],
        "held_out": [each for each in clients if not each["trains"]],
    }
    return {
        name: {"clients": len(group), "samples": sum(each["samples"] for each in group), **spread(group)}
        for name, group in groups.items()
        if group
    }


def _round_of(path: Path) -> int | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
