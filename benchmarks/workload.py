"""One round of local training, the same for every side of a benchmark: model, clients, samples and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from peft import PeftModel
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedllm import load_recipe
from fedllm.common.errors import UserError
from fedllm.data.tokenization import Tokens
from fedllm.experiment.build import Job, ReadCache, assemble
from fedllm.federation.rounds import Plan, run_round
from fedllm.federation.state import blank
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora

LR = 5e-4
LOCAL = "{name: localadamw, lr: 5.0e-4}"  # AdamW as torch has it


@dataclass
class Work:
    """The clients' full batches of one round, and the job with which fedllm trains them."""

    job: Job
    clients: list[int]
    batches: list[list[Tensor]]

    @classmethod
    def of(
        cls, recipe: str, overrides: Sequence[str], clients: int, steps: int, batch: int, cache: ReadCache | None = None
    ) -> Work:
        """The first `clients` clients that have samples for `steps` full batches."""
        local = f"local={{steps: {steps}, batch_size: {batch}}}"
        sampled = [f"federation.clients_per_round={clients}", "federation.tracked_per_round=null"]
        settings = [f"algorithm={LOCAL}", local, *sampled, *overrides]
        job = assemble(load_recipe(recipe, settings), cache=cache)
        large = [client for client, part in enumerate(job.parts) if len(part) >= steps * batch][:clients]
        if len(large) < clients:
            raise UserError(f"{len(large)} clients have {steps * batch} samples, expected {clients} such clients")
        source = job.problem.batches
        return cls(job, large, [[torch.from_numpy(source.indices(c, 0, k)) for k in range(steps)] for c in large])

    @property
    def client_steps(self) -> int:
        """Client-steps of the round."""
        return sum(map(len, self.batches))

    @property
    def tokens(self) -> int:
        """Tokens of the round's samples, without padding."""
        lengths = self.job.problem.rows.tokens.lengths
        return int(sum(lengths[batch].sum() for batches in self.batches for batch in batches))

    @property
    def operations(self) -> float:
        """Floating-point operations of the round's matrix products with frozen weights, without padding: per weight and
        token 2 in the forward pass and 2 for the gradient of the inputs. The head of a language model counts for the
        learned tokens alone."""
        layers = [module for module in self.job.model.modules() if isinstance(module, nn.Linear | Conv1D)]
        frozen = [layer for layer in layers if not layer.weight.requires_grad]
        if self.job.task.generates:
            head = self.job.model.get_base_model().get_output_embeddings()
            frozen = [layer for layer in frozen if layer is not head]
            sizes = self.job.problem.rows.tokens.sizes
            learned = sum(int(sizes[batch].sum()) for batches in self.batches for batch in batches)
            heads = 4.0 * learned * head.weight.numel()
        else:
            heads = 0.0
        return 4.0 * self.tokens * sum(layer.weight.numel() for layer in frozen) + heads

    def ours(self, stacked: int | None = None) -> Tensor:
        """The round with fedllm, `stacked` clients together (default: the job's number); returns the new x [d]."""
        job = self.job
        federation = blank(job.setup)
        plan = Plan(stacked or job.stacked_clients)
        run_round(job.setup, federation, self.clients, self.clients, plan)
        return federation.x


@dataclass
class Plain:
    """An ordinary PEFT model that stays in memory, and its trainable values as one vector."""

    model: PeftModel
    space: ParameterSpace

    @classmethod
    def of(cls, job: Job) -> Plain:
        """A second copy of the job's model, with transformers' own forward."""
        recipe = job.recipe
        backbone = load_backbone(recipe.model, job.task.head, seed=recipe.run.seed)
        model = attach_lora(backbone, recipe.lora, seed=recipe.run.seed).to(job.machine.device).eval()
        return cls(model, ParameterSpace.of(model))

    def trainable(self) -> list[torch.nn.Parameter]:
        """The trainable parameters."""
        return [value for value in self.model.parameters() if value.requires_grad]


def inputs(job: Job, batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Model inputs of these samples, padded to the longest of them, and their labels: a class id each [n], or of a
    language model the ids of the learned tokens [n, tokens], -100 elsewhere."""
    tokens = job.problem.rows.tokens
    rows = tokens.rows(batch, pad_id=int(job.backbone.tokenizer.pad_token_id or 0))
    labels = tokens.targets[batch] if tokens.learned is None else token_labels(tokens, batch)
    device = job.machine.device
    return {name: value.to(device) for name, value in rows.items()}, labels.to(device)


def token_labels(tokens: Tokens, batch: Tensor) -> Tensor:
    """The ids of the learned tokens [n, tokens] of some samples, -100 elsewhere."""
    assert tokens.learned is not None
    labels = torch.full((len(batch), int(tokens.lengths[batch].max())), -100)
    for row, sample in enumerate(batch.tolist()):
        own = slice(*tokens.offsets[sample : sample + 2].tolist())
        ids = tokens.input_ids[own].long()
        labels[row, : len(ids)] = torch.where(tokens.learned[own], ids, -100)
    return labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of classes, or of the learned tokens, each predicted at the token before it."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


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
        loss_of(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain.space.gather(plain.model)


def mean(rows: Iterator[Tensor]) -> Tensor:
    """The plain mean of vectors, in float64."""
    return torch.stack(list(rows)).double().mean(dim=0).float()
