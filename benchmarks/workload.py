"""One round of federated work that every side of a benchmark does alike: the same model, clients, samples and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from peft import PeftModel
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedllm import load_recipe
from fedllm.assemble import Job, Shelf, assemble
from fedllm.errors import UserError
from fedllm.lora import attach_lora
from fedllm.models import load_backbone
from fedllm.rounds import Plan, blank, run_round
from fedllm.space import ParameterSpace

LR = 5e-4
LOCAL = "{name: localadamw, lr: 5.0e-4}"  # AdamW as torch has it


@dataclass
class Work:
    """The clients' full batches of one round, and the job that trains them our way."""

    job: Job
    clients: list[int]
    batches: list[list[Tensor]]

    @classmethod
    def of(
        cls, recipe: str, overrides: Sequence[str], clients: int, steps: int, batch: int, shelf: Shelf | None = None
    ) -> Work:
        """The first `clients` clients that have samples for `steps` full batches."""
        local = f"local={{steps: {steps}, batch_size: {batch}}}"
        settings = [f"algorithm={LOCAL}", local, f"federation.clients_per_round={clients}", *overrides]
        job = assemble(load_recipe(recipe, settings), shelf=shelf)
        large = [client for client, part in enumerate(job.parts) if len(part) >= steps * batch][:clients]
        if len(large) < clients:
            raise UserError(f"{len(large)} clients have {steps * batch} samples, expected {clients} such clients")
        source = job.problem._batches
        return cls(job, large, [[torch.from_numpy(source.indices(c, 0, k)) for k in range(steps)] for c in large])

    @property
    def client_steps(self) -> int:
        """Client-steps of the round."""
        return sum(map(len, self.batches))

    @property
    def tokens(self) -> int:
        """Tokens of the round's samples, without padding."""
        lengths = self.job.problem._tokens.lengths
        return int(sum(lengths[batch].sum() for batches in self.batches for batch in batches))

    @property
    def operations(self) -> float:
        """Of the round's matrix products with frozen weights, without padding: a weight and token takes 2 forward, and
        2 for the gradient of the inputs."""
        layers = (module for module in self.job.model.modules() if isinstance(module, nn.Linear | Conv1D))
        return 4.0 * self.tokens * sum(m.weight.numel() for m in layers if not m.weight.requires_grad)

    def ours(self, cohort: int | None = None) -> Tensor:
        """The round our way, in cohorts of the job's size or this one; returns the new global x [d]."""
        job = self.job
        federation = blank(job.algorithm, job.problem, job.info)
        plan = Plan(cohort or job.cohort)
        run_round(job.algorithm, job.problem, federation, job.info, self.clients, self.clients, plan)
        return federation.x


@dataclass
class Plain:
    """A PEFT model as anyone trains it, kept in memory, and its trainable values as one vector."""

    model: PeftModel
    space: ParameterSpace

    @classmethod
    def of(cls, job: Job) -> Plain:
        """The job's model once more, with its own forward."""
        recipe = job.recipe
        backbone = load_backbone(
            recipe.model, num_labels=job.task.num_labels, regression=job.task.regression, seed=recipe.run.seed
        )
        model = attach_lora(backbone, recipe.lora, seed=recipe.run.seed).to(job.machine.device).eval()
        return cls(model, ParameterSpace.of(model))

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [value for value in self.model.parameters() if value.requires_grad]


def inputs(job: Job, batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Model inputs of these samples, padded to the longest of them, and their labels."""
    tokens = job.problem._tokens
    rows = tokens.rows(batch, pad_id=int(job.backbone.tokenizer.pad_token_id or 0))
    device = job.machine.device
    return {name: value.to(device) for name, value in rows.items()}, tokens.labels[batch].to(device)


def train_client(plain: Plain, job: Job, x: Tensor, batches: list[Tensor]) -> Tensor:
    """One client's local AdamW from x [d], in a bare torch loop; returns its weights [d]."""
    plain.space.scatter(plain.model, x)
    optimizer = torch.optim.AdamW(plain.trainable(), lr=LR, weight_decay=job.algorithm.weight_decay)
    for batch in batches:
        features, labels = inputs(job, batch)
        with torch.autocast(
            job.machine.device.type, dtype=job.machine.autocast, enabled=job.machine.autocast is not None
        ):
            logits = plain.model(**features).logits
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain.space.gather(plain.model)


def mean(rows: Iterator[Tensor]) -> Tensor:
    """The plain mean of vectors, in float64."""
    return torch.stack(list(rows)).double().mean(dim=0).float()
