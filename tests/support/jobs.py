"""The tiny federation, built up to its first step."""

from __future__ import annotations

from pathlib import Path

import torch

from fedllm.config.recipe import load_recipe
from fedllm.experiment.build import Job, assemble


def job(tiny: Path, *overrides: str) -> Job:
    return assemble(load_recipe(tiny / "recipe.yaml", overrides))


def batches(built: Job, client: int, round: int) -> list[dict[str, torch.Tensor]]:
    source, tokens = built.problem.batches, built.problem.rows.tokens
    indices = [torch.from_numpy(source.indices(client, round, k)) for k in range(source.steps(client))]
    return [{**tokens.rows(index, pad_id=1), "labels": tokens.targets[index]} for index in indices]
