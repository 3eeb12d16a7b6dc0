"""The Problem of production: clients fine-tune LoRA adapters and a task head over one shared frozen base."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedllm.algorithms.base import Contrast
from fedllm.blocks import BlockPartition
from fedllm.common.profiling import section
from fedllm.data.client_batches import ClientBatches
from fedllm.data.samples import Samples
from fedllm.data.tokenization import send
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.quantization import settle
from fedllm.problems.base import SampleGradients
from fedllm.problems.contrast import Representations, require_classifier
from fedllm.problems.lora.compatibility import IndependenceCheck
from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.evaluation_batches import evaluate, evaluation_batches
from fedllm.problems.lora.memory_probe import measure, measure_checkpointed
from fedllm.problems.lora.packed_rows import find_packed_rows
from fedllm.problems.lora.padded_rows import PaddedRows
from fedllm.problems.lora.passes import Passes
from fedllm.problems.lora.readout import TokenReadout, readout_of
from fedllm.problems.lora.row_layout import DropoutKeys, RowLayout
from fedllm.problems.lora.stacked_model import StackedModel
from fedllm.problems.model_problem import Losses, ModelProblem
from fedllm.problems.sample_rows import SampleRows, largest_bytes


class LoraProblem(ModelProblem):
    """gradient(X [C, d]) of C clients, as many of them in one forward and backward of the base as memory allows.

    model: a PEFT model whose trainable parameters, in their order, are the flat vector; it is changed until `release`
    (see StackedModel). tokens: the training samples. batches: who takes which at which step; its seed draws the dropout
    too. losses: the task's. The loss of a client is the mean over its own samples, or over their learned
    tokens where they have any; padding has no weight.
    Raises UserError for a model that cannot be trained so.

    rows: how samples are laid out in rows. passes: how clients are cut into passes. eval_cuts: in how many parts each
    batch of an evaluation is computed.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Samples,
        batches: ClientBatches,
        losses: Losses,
        settings: EngineSettings,
        blocks: BlockPartition | None = None,
    ) -> None:
        space = ParameterSpace.of(model)
        self.dim, self.num_clients, self.blocks = space.dim, len(batches.parts), blocks
        settle(model.eval(), settings.autocast)
        readout = readout_of(model, tokens)
        check = IndependenceCheck(model, space, tokens, readout)
        self.model, self.batches, self.losses = StackedModel(model, space, readout), batches, losses
        padded = PaddedRows(self.model, tokens, settings.pad_id)
        exact = self.model.exact
        tolerance = 0.001 if exact else 0.3
        check.compare(padded.outputs_of, tolerance)
        # Equal rows make batched products of the adapters, which a GPU wants; a CPU rather loops, over float32 weights.
        equal = self.model.start.device.type != "cpu" or not exact
        # One row for all saves their padding. Classifiers, whose texts may be much shorter, gain nothing from it.
        flat = not equal and isinstance(readout, TokenReadout)
        self._packed = find_packed_rows(padded, equal=equal, flat=flat, tolerance=tolerance)
        self.rows: RowLayout = padded
        self.choose_rows(settings.slices)
        self.model.lower(settings.autocast)
        memory = measure_checkpointed(padded) if settings.checkpointing else measure(padded)
        memory = replace(memory, fixed=memory.fixed + readout.workspace)
        self.passes = Passes.within(memory, settings.pass_bytes, settings.least_tokens)
        self.eval_cuts = 1

    @property
    def space(self) -> ParameterSpace:
        """The trainable parameters as one flat vector."""
        return self.model.space

    @property
    def samples(self) -> Samples:
        return self.rows.tokens

    @property
    def packed(self) -> bool:
        """Whether a row may hold several samples."""
        return self.rows.packed

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.model.layers

    @property
    def fixed_bytes(self) -> float:
        """Bytes that every pass saves for its backward, however few tokens it has."""
        return self.passes.memory.fixed

    @property
    def token_bytes(self) -> float:
        """Bytes that a pass saves for its backward for each of its tokens."""
        return self.passes.memory.token

    @property
    def pass_tokens(self) -> float:
        """Tokens of a pass of several clients at most, and of a batch of an evaluation."""
        return self.passes.tokens

    def initial(self) -> Tensor:
        return self.model.start.clone()

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        return self._gradients(X, None, clients, round, step)

    def contrastive_gradient(
        self, X: Tensor, contrast: Contrast, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        with self.representations.shown():
            return self._gradients(X, contrast, clients, round, step)

    def _gradients(
        self, X: Tensor, contrast: Contrast | None, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        with section("data"):
            batches = [self.batches.indices(client, round, step) for client in clients]
        losses, gradients = torch.zeros(len(clients), device=X.device), torch.empty_like(X)
        for some in self.passes.cut(self.rows.sizes(batches)):
            keys = partial(row_keys, self.batches.seed, round, step, clients[some])
            counts = [self._targets(batch) for batch in batches[some]]
            term = None if contrast is None else contrast.rows(some)
            losses[some], gradients[some] = self._pass(X[some], batches[some], counts, keys, contrast=term)
        return losses, gradients

    def sample_gradients(
        self, X: Tensor, samples: Sequence[np.ndarray], clients: Sequence[int], round: int, step: int
    ) -> Iterator[SampleGradients]:
        """Each sample has a row of its own, with its client's parameters, as if it were a client's whole batch."""
        layout = PaddedRows(self.model, self.rows.tokens, self.rows.pad_id)
        every = SampleRows.of(samples, clients, layout.lengths)
        for some in every.passes(layout.lengths, self.passes, self.dim):
            counts = [self._targets(sample) for sample in some.batches]
            keys = some.keys(self.batches.seed, round, step)
            losses, gradients = self._pass(X[torch.from_numpy(some.rows)], some.batches, counts, keys, layout)
            yield SampleGradients(some.rows.tolist(), losses, gradients)

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        """Gradients [C, d] of the clients' mean losses over all their samples, without dropout."""
        falling = sorted(range(len(clients)), key=lambda row: -len(self.batches.parts[clients[row]]))
        parts = [self.batches.parts[clients[row]] for row in falling]
        gradients = torch.zeros(len(clients), self.dim, device=x.device)
        for begin in range(0, len(parts[0]), size := self.batches.batch_size):
            batches = [part[begin : begin + size] for part in parts if begin < len(part)]
            for some in self.passes.cut(self.rows.sizes(batches)):
                X, counts = x.repeat(len(batches[some]), 1), [self._targets(part) for part in parts[some]]
                gradients[some] += self._pass(X, batches[some], counts, None)[1]
        return gradients[np.argsort(falling)]

    @torch.no_grad()
    def outputs(
        self, x: Tensor, tokens: Samples, part: int = 0, parts: int = 1, buffers: Tensor | None = None
    ) -> Tensor:
        """Outputs of the head [n, L] (float32, CPU) for all samples at x [d], in large batches of similar lengths.

        Of these batches only every `parts`-th from number `part` on is computed; the rows of the others are zeros.
        Where memory gives out, the rest is computed in more parts, `eval_cuts`. Raises RunError where a sample alone
        does not fit.
        """
        rows = PaddedRows(self.model, tokens, self.rows.pad_id)
        batches = evaluation_batches(rows.lengths, self.pass_tokens)
        own = batches[part::parts]

        def outputs_of(index: Tensor) -> Tensor:
            return rows.outputs_of(x[None], index).cpu()

        found, self.eval_cuts = evaluate(outputs_of, rows.lengths, own or batches[:1], self.eval_cuts)
        return found if own else torch.zeros_like(found)

    def choose_rows(self, slices: int | None) -> None:
        """Lays samples out from now on as EngineSettings.slices says."""
        if slices is None and self._packed is not None:
            self.rows = self._packed
        else:
            self.rows = PaddedRows(self.model, self.rows.tokens, self.rows.pad_id, slices)

    def largest_pass(self, clients: Sequence[int], steps: int) -> int:
        """Tokens of the largest pass that these clients make together in the first `steps` steps of round 0."""
        batches = ([self.batches.indices(client, 0, step) for client in clients] for step in range(steps))
        return max((self.passes.largest(self.rows.sizes(taken)) for taken in batches), default=0)

    def largest_sample_pass(self, clients: Sequence[int], steps: int) -> int:
        """The same for passes of single samples: the tokens that take as many bytes as the samples with their vectors.

        It is an estimate from the longest sample and twice the expected batches, whatever the steps."""
        longest = int(self.rows.lengths.max())
        expected = sum(min(self.batches.batch_size, len(self.batches.parts[client])) for client in clients)
        return math.ceil(largest_bytes(longest, 2 * expected, self.passes, self.dim) / self.token_bytes)

    def release(self) -> None:
        """Gives the model back as it was."""
        self.model.release()

    def _targets(self, samples: np.ndarray) -> int:
        """How many targets the loss of these samples is the mean over."""
        return int(self.rows.tokens.sizes[torch.from_numpy(samples)].sum())

    def _pass(
        self,
        X: Tensor,
        batches: list[np.ndarray],
        counts: list[int],
        keys: DropoutKeys | None,
        layout: RowLayout | None = None,
        contrast: Contrast | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Losses [C] and gradients [C, d] of some clients: one forward and backward per micro-batch.

        counts [C]: targets that a client's mean is over. keys: None for no dropout. layout: None for `rows`. contrast:
        of these clients, while representations are shown.
        """
        layout = layout or self.rows
        with section("data"):
            micros = layout.micro_batches(batches)
        X = X.detach().requires_grad_()
        found = torch.zeros(len(counts), device=X.device)
        for micro in micros:
            losses = self.losses
            if contrast is not None:
                with torch.no_grad():
                    others = [layout.outputs(rows, micro, keys) for rows in (contrast.near, contrast.far)]
                losses = self.representations.add(losses, contrast, *others)
            outputs = layout.outputs(X, micro, keys)
            found += self._descend(outputs, micro.samples, counts, losses)
        assert X.grad is not None
        return found, X.grad

    def find_representations(self) -> Representations:
        require_classifier(self.rows.tokens)
        padded = PaddedRows(self.model, self.rows.tokens, self.rows.pad_id)
        return Representations.of(
            self.model.model, lambda: padded.outputs_of(self.model.start[None], torch.tensor([0]))
        )

    def _descend(self, outputs: Tensor, samples: Tensor, counts: list[int], losses: Losses) -> Tensor:
        """Backward of the samples' part of the clients' mean losses; returns that part [C].

        samples [C, m], -1 for none. counts [C]: targets that a client's mean is over. losses: of each sample.
        """
        with section("data"):
            real = samples >= 0
            weight = send((real / torch.tensor(counts)[:, None]).to(outputs.dtype), outputs.device)
            targets = send(self.rows.tokens.targets[samples.clamp(min=0).reshape(-1)], outputs.device)
        with section("forward"):
            means = (losses(outputs, targets).view_as(weight) * weight).sum(dim=1)
        with section("backward"):
            means.sum().backward()  # type: ignore[no-untyped-call]
        return means.detach()
