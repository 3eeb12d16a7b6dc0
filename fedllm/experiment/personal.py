"""Clients with heads of their own (deployment.keep_local): their models, and the scores of these."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedllm.deployment.rounds import weighted
from fedllm.deployment.site_messages import Scores
from fedllm.experiment.build import trainable
from fedllm.experiment.evaluation import finite, scores_at
from fedllm.experiment.job import Job
from fedllm.experiment.trained_files import save_trained
from fedllm.federation.executor import Executor
from fedllm.federation.setup import PERSONAL
from fedllm.federation.state import FederationState
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import load_backbone
from fedllm.models.norms import write_statistics
from fedllm.results.format import round_to


def personal_model(job: Job, x: Tensor, own: Tensor) -> Tensor:
    """The vector [d] of a client's model: the server's x [d] with the client's own coordinates [p]."""
    assert job.problem.personal is not None, "the recipe keeps nothing at the clients"
    return x.index_copy(0, job.problem.personal, own.to(x))


def write_personal(job: Job, x: Tensor, buffers: Tensor | None, folder: Path) -> Path:
    """Writes x [d], a client's own model, as an adapter or a model into `folder`, and returns that.

    The model is loaded a second time, on the CPU: the job's own goes on being trained. buffers: see outputs_at."""
    recipe = job.recipe
    backbone = load_backbone(recipe.model, job.task.head, local_hub=recipe.run.local_hub, seed=recipe.run.seed)
    model = trainable(backbone, recipe, recipe.run.seed)
    ParameterSpace.of(model).scatter(model, x.cpu())
    if buffers is not None:
        write_statistics(model, buffers.cpu())
    return save_trained(recipe, model, folder / recipe.trained_folder, backbone, job.task, None)


def evaluate_clients(job: Job, state: FederationState, executor: Executor) -> dict[str, Any]:
    """The means of the scores that the clients' own models have on their own validation samples, see `_own_rows`.

    They are weighted by the samples, like the scores of real sites."""
    began = time.perf_counter()
    rows = _own_rows(job)
    heads = client_heads(job, state, executor)
    found: dict[int, Scores] = {}
    for client, own in enumerate(rows):
        if len(own):
            samples = job.validation.take(torch.from_numpy(own))
            x = personal_model(job, state.x, heads[client])
            scores = finite(scores_at(job, x, samples, executor, state.buffers))
            found[client] = Scores(state.round, len(own), scores)
    return weighted(found) | {"eval_seconds": round_to(time.perf_counter() - began)}


def _own_rows(job: Job) -> list[np.ndarray]:
    """Each client's validation samples: under scheme by_column those with a value that its training samples have, if
    the validation split has the column too; otherwise all."""
    column, validation = job.recipe.partition.column, job.dataset.validation.columns
    everything = np.arange(len(job.validation))
    if job.recipe.partition.scheme != "by_column" or column not in validation:
        return [everything] * len(job.parts)
    training = job.dataset.train.columns[column]
    values = [str(value) for value in validation[column]]
    owned = [{str(training[int(sample)]) for sample in part} for part in job.parts]
    return [np.array([row for row in everything if values[row] in own], np.int64) for own in owned]


def client_heads(job: Job, state: FederationState, executor: Executor) -> Tensor:
    """The training clients' own coordinates [N, p], in every process."""
    assert job.problem.personal is not None
    clients, places = range(job.info.num_clients), job.problem.personal
    executor.fetch(state.clients)
    if executor.rank == 0:
        found = state.clients.get(clients, state.x.device)[PERSONAL]
    else:
        found = state.x.new_zeros(len(clients), len(places))
    return executor.from_first({PERSONAL: found})[PERSONAL]
