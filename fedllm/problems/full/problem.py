"""The Problem of full-parameter training: clients train all weights of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedllm.algorithms.base import Contrast
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.common.profiling import section
from fedllm.common.seeding import derive
from fedllm.data.client_batches import ClientBatches
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.base import Buffers, SampleGradients
from fedllm.problems.checks import NO_BUFFERS
from fedllm.problems.contrast import Representations, Term, require_classifier
from fedllm.problems.full.batch_reader import Batch, BatchReader
from fedllm.problems.full.pass_memory import measure
from fedllm.problems.full.plain_model import Mode, PlainModel
from fedllm.problems.full.samples import Samples
from fedllm.problems.full.settings import FullSettings
from fedllm.problems.full.stacked_step import require_stackable, stacked_step
from fedllm.problems.lora.attention import is_causal
from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.evaluation_batches import evaluate, evaluation_batches
from fedllm.problems.lora.passes import Passes
from fedllm.problems.lora.row_layout import DropoutKeys
from fedllm.problems.model_problem import Losses, ModelProblem
from fedllm.problems.sample_rows import SampleRows, largest_bytes


class FullProblem(ModelProblem):
    """gradient(X [C, d]) of C clients, one after the other, or with settings.stacked together.

    model: a float32 module whose output has `.logits`; it is not changed. Its trainable parameters, in their order, are
    the flat vector. samples: of training; those with learned tokens are for a causal language model. batches: who takes
    which sample at which step. Its seed draws dropout and augmentation too, by (round, step, client), so that how
    clients are grouped changes nothing. losses: the task's. A client's loss is the sum of its samples' losses by the
    sum of their sizes, for classifiers the mean.

    A batch that does not fit into a pass is cut, with the same mean; a model with batch norm takes every batch whole.
    Raises UserError for a model that cannot be trained so.
    """

    packed = False
    smaller_steps = (
        "lower local.batch_size or data.max_length, take a smaller model, or train adapters (leave out lora: null)"
    )

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        batches: ClientBatches,
        losses: Losses,
        settings: FullSettings | None = None,
        blocks: BlockPartition | None = None,
    ) -> None:
        settings = settings or FullSettings()
        self.model, self.losses, self.batches = PlainModel(model.eval(), settings.autocast), losses, batches
        self.dim, self.num_clients, self.blocks = self.model.space.dim, len(batches.parts), blocks
        self.reader = BatchReader(samples, settings.pad_id, is_causal(model))
        if self.model.buffers.dim:
            self.buffers = Buffers(self.model.first_buffers, settings.local_buffers)
        self._read_tokens(settings)
        with _drawn_from(0, self.model.start.device):
            self.passes = Passes.within(measure(self.model, self.reader), settings.pass_bytes)
        self.stacked = settings.stacked
        if self.stacked:
            require_stackable(self.model, self.reader, losses)

    @property
    def space(self) -> ParameterSpace:
        return self.model.space

    @property
    def samples(self) -> Any:
        return self.reader.samples

    @property
    def pass_tokens(self) -> float:
        return self.passes.tokens

    def initial(self) -> Tensor:
        return self.model.start.clone()

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        """Mini-batch losses [C] and gradients [C, d]. New running statistics of a batch norm are forgotten."""
        return self.train_step(X, self.model.first_buffers.repeat(len(clients), 1), clients, round, step)

    def train_step(
        self, X: Tensor, buffers: Tensor, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        return self._gradients(X, buffers, None, clients, round, step)

    def contrastive_gradient(
        self, X: Tensor, contrast: Contrast, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        with self.representations.shown():
            no_buffers = self.model.first_buffers.repeat(len(clients), 1)
            return self._gradients(X, no_buffers, contrast, clients, round, step)

    def _gradients(
        self,
        X: Tensor,
        buffers: Tensor,
        contrast: Contrast | None,
        clients: Sequence[int],
        round: int,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        """contrast: while representations are shown, for a model without buffers; None for none."""
        with section("data"):
            batches = [self.batches.indices(client, round, step) for client in clients]
        losses, gradients = torch.zeros(len(clients), device=X.device), torch.zeros_like(X)
        with self.model.mode(Mode.TRAIN):
            for some in self._together(batches):
                keys = partial(row_keys, self.batches.seed, round, step, clients[some])
                term = None if contrast is None else (self.representations, contrast.rows(some))
                if some.stop - some.start > 1:
                    stacked = self.reader.stack(batches[some], X.device, keys)
                    losses[some], gradients[some] = stacked_step(self.model, self.losses, X[some], stacked, term)
                    continue
                row = some.start
                seed = derive(self.batches.seed, "dropout", round, step, clients[row])
                with _drawn_from(seed, X.device), _naming(clients[row], len(batches[row])):
                    total = self._targets(batches[row])
                    losses[row] = self._descend(X[row], buffers[row], batches[row], keys, total, gradients[row], term)
        return losses, gradients

    def sample_gradients(
        self, X: Tensor, samples: Sequence[np.ndarray], clients: Sequence[int], round: int, step: int
    ) -> Iterator[SampleGradients]:
        """One sample after the other, or with settings.stacked several in a pass. There is no batch norm."""
        lengths = self.reader.lengths
        for some in SampleRows.of(samples, clients, lengths).passes(lengths, self._sample_passes, self.dim):
            with self.model.mode(Mode.TRAIN):
                losses, gradients = self._single(X, some, round, step)
            yield SampleGradients(some.rows.tolist(), losses, gradients)

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        """Gradients [C, d] of the clients' mean losses over all their samples, without dropout.

        They are computed in batches of batch_size. Batch norm takes the statistics of each batch.
        """
        gradients = torch.zeros(len(clients), self.dim, device=x.device)
        with self.model.mode(Mode.GRADIENT):
            for row, client in enumerate(clients):
                part = self.batches.parts[client]
                total = self._targets(part)
                for begin in range(0, len(part), size := self.batches.batch_size):
                    batch, unused = part[begin : begin + size], self.model.first_buffers.clone()
                    with _naming(client, len(batch)):
                        self._descend(x, unused, batch, None, total, gradients[row])
        return gradients

    @torch.no_grad()
    def outputs(
        self, x: Tensor, samples: Samples, part: int = 0, parts: int = 1, buffers: Tensor | None = None
    ) -> Tensor:
        reader, lengths = BatchReader(samples, self.reader.pad_id), samples.lengths.numpy()
        batches = evaluation_batches(lengths, self.pass_tokens)
        own = batches[part::parts]

        def outputs_of(index: Tensor) -> Tensor:
            batch = reader.read(index.numpy(), x.device)
            return self.model.outputs(x, buffers, batch).cpu()

        found, self.eval_cuts = evaluate(outputs_of, lengths, own or batches[:1], self.eval_cuts)
        return found if own else torch.zeros_like(found)

    def largest_pass_bytes(self, together: int) -> float:
        """Bytes that the largest pass saves for its backward for its samples, with `together` clients trained together.

        It is estimated from the longest sample and the largest batch.
        """
        most = max(min(len(part), self.batches.batch_size) for part in self.batches.parts)
        tokens = float(most * int(self.reader.lengths.max()))
        if self.stacked:
            tokens = max(tokens, min(tokens * together, self.pass_tokens))
        elif self.buffers is None:
            tokens = min(tokens, max(self.pass_tokens, float(self.reader.lengths.max())))
        return tokens * self.passes.memory.token

    def largest_sample_pass_bytes(self, together: int) -> float:
        """The same for passes of single samples, with their vectors; twice the expected batches are counted."""
        longest, passes = int(self.reader.lengths.max()), self._sample_passes
        return largest_bytes(longest, 2 * self.batches.batch_size * together, passes, self.dim)

    def release(self) -> None:
        """The model was never changed."""

    @property
    def _sample_passes(self) -> Passes:
        """Those of single samples: without settings.stacked, one has a pass of its own."""
        return self.passes if self.stacked else Passes(self.passes.memory, 0.0)

    def _single(self, X: Tensor, some: SampleRows, round: int, step: int) -> tuple[Tensor, Tensor]:
        """Losses [R] and gradients [R, d] of single samples."""
        keys = some.keys(seed := self.batches.seed, round, step)
        if self.stacked:
            batch = self.reader.stack(some.batches, X.device, keys)
            return stacked_step(self.model, self.losses, X[torch.from_numpy(some.rows)], batch)
        (row,), (client,), (slot,) = some.rows, some.clients, some.slots
        gradients, total = torch.zeros_like(X[:1]), self._targets(some.samples)
        with _drawn_from(derive(seed, "sample dropout", round, step, client, slot), X.device):
            loss = self._descend(X[row], self.model.first_buffers.clone(), some.samples, keys, total, gradients[0])
        return loss[None], gradients

    def _read_tokens(self, settings: FullSettings) -> None:
        """Of learned tokens, a few at a time are compared with the vocabulary; of stacked clients all."""
        device = self.model.start.device
        shortest = self.reader.read(np.array([int(self.reader.lengths.argmin())]), device)
        if shortest.places is not None and not settings.stacked:
            self.model.read_tokens(shortest.inputs)

    def _together(self, batches: Sequence[np.ndarray]) -> Iterator[slice]:
        """Slices of neighbouring clients that share a pass."""
        if not self.stacked:
            return (slice(row, row + 1) for row in range(len(batches)))
        lengths = self.reader.lengths
        longest, most = max(int(lengths[batch].max()) for batch in batches), max(map(len, batches))
        return self.passes.cut([longest * most] * len(batches))

    def _cut(self, batch: np.ndarray) -> list[np.ndarray]:
        """Places of a batch in parts that fit into a pass, of samples of similar length; a model with batch norm takes
        the batch whole."""
        lengths = self.reader.lengths[batch]
        if self.buffers is not None or len(batch) * int(lengths.max()) <= self.pass_tokens:
            return [np.arange(len(batch))]
        return [np.array(part) for part in evaluation_batches(lengths, self.pass_tokens)]

    def _targets(self, batch: np.ndarray) -> int:
        """How many targets the samples of a batch have."""
        return int(self.samples.sizes[torch.from_numpy(batch)].sum())

    def find_representations(self) -> Representations:
        require_classifier(self.samples)
        if self.buffers is not None:
            raise UserError(f"{type(self.model.model).__name__}: {NO_BUFFERS}")
        read = self.reader.read(np.array([0]), self.model.start.device)
        return Representations.of(self.model.model, lambda: self.model.outputs(self.model.start, None, read))

    def _descend(
        self,
        x: Tensor,
        buffers: Tensor,
        batch: np.ndarray,
        keys: DropoutKeys | None,
        total: int,
        gradient: Tensor,
        term: Term | None = None,
    ) -> Tensor:
        """Adds the gradient of the batch's losses by `total` to `gradient` [d]; returns their sum by `total`."""
        x = x.detach().requires_grad_()
        x.grad = gradient
        sum_of_losses = torch.zeros((), device=x.device)
        for slots in self._cut(batch):
            with section("data"):
                read = self.reader.read(batch[slots], x.device, keys, slots)
            with section("forward"):
                losses = self.losses if term is None else self._contrasted(read, *term)
                outputs = self.model.outputs(x, buffers, read)
                loss = losses(outputs, read.targets).sum() / total
            with section("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            sum_of_losses += loss.detach()
        return sum_of_losses

    @torch.no_grad()
    def _contrasted(self, read: Batch, shown: Representations, contrast: Contrast) -> Losses:
        """The losses with the contrast of one client. Dropout is drawn as for the outputs that follow."""
        others = []
        for (x,) in (contrast.near, contrast.far):
            with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
                others.append(self.model.outputs(x, None, read))
        return shown.add(self.losses, contrast, *others)


@contextmanager
def _drawn_from(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers inside are drawn from `seed`; outside, the generators are as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _naming(client: int, samples: int) -> Iterator[None]:
    """Batch norm's error for a batch of one value per channel, with the client's name."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"client {client}: batch norm needs more than its batch of {samples}; raise partition.min_size, choose a "
            f"local.batch_size that leaves no such rest, or set model.norm=group"
        ) from error
