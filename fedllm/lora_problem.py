"""The Problem of production: clients fine-tune LoRA adapters and a task head over one shared frozen base."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedllm.batches import ClientBatches, MicroBatch, micro_batches
from fedllm.blocks import BlockPartition
from fedllm.cohort import CohortModel
from fedllm.dropout import row_keys
from fedllm.problem import Problem
from fedllm.space import ParameterSpace
from fedllm.tokens import Tokens

# Padded tokens that one more slice costs as much as, by device: what a pass pays however small it is.
SLICE_OVERHEAD = {"cpu": 64.0, "cuda": 4096.0}
EVAL_TOKENS = {"cpu": 4096, "cuda": 131072}


class LoraProblem(Problem):
    """gradient(X [C, d]) of C clients in one forward and backward of the base a slice.

    model: a PEFT model whose trainable parameters, in their order, are the flat vector; the model is taken over (see
    CohortModel). tokens: the training samples. batches: who takes which. regression: squared error instead of
    cross-entropy. autocast: dtype of the matrix products, None for the model's own. slices: length-sorted slices a
    batch, None for the best cut; may be changed between rounds. The loss of a client is the mean over its own samples;
    padding has no weight.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        batches: ClientBatches,
        *,
        regression: bool = False,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        slices: int | None = None,
        blocks: BlockPartition | None = None,
        pad_id: int = 0,
    ) -> None:
        self.space = ParameterSpace.of(model)
        self.dim, self.num_clients, self.blocks = self.space.dim, len(batches.parts), blocks
        self._x0 = self.space.gather(model)
        self.device = self._x0.device
        self._model = CohortModel(model, self.space)
        self._tokens, self._batches = tokens, batches
        self._lengths = tokens.lengths.numpy()
        self._shortest = int(self._lengths.argmin())
        self._regression, self._seed, self.slices, self._pad_id = regression, seed, slices, pad_id
        self._autocast = autocast
        self._overhead = SLICE_OVERHEAD[self.device.type]

    def initial(self) -> Tensor:
        return self._x0.clone()

    def steps(self, clients: Sequence[int], round: int) -> Tensor:
        return torch.tensor([self._batches.steps(client) for client in clients])

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([float(len(self._batches.parts[client])) for client in clients])

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        batches = [self._batches.indices(client, round, step) for client in clients]
        X = X.detach().requires_grad_()
        losses = torch.zeros(len(clients), device=X.device)
        for micro in micro_batches(batches, self._lengths, overhead=self._overhead, slices=self.slices):
            keys = row_keys(self._seed, round, step, clients, micro.slots)
            losses += self._backward(X, micro, [len(batch) for batch in batches], keys)
        return losses, _grad(X)

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        """Gradients [C, d] of the clients' mean losses over all their samples, without dropout."""
        X = x.expand(len(clients), -1).clone().requires_grad_()
        parts = [self._batches.parts[client] for client in clients]
        width = -(-max(map(len, parts)) // self._batches.batch_size)
        for micro in micro_batches(parts, self._lengths, overhead=0.0, slices=width):
            self._backward(X, micro, [len(part) for part in parts], None)
        return _grad(X)

    @torch.no_grad()
    def logits(self, x: Tensor, tokens: Tokens, part: int = 0, parts: int = 1) -> Tensor:
        """Logits [n, labels] (float32, CPU) of all samples at x [d], in large length-sorted batches.

        Of these batches only every `parts`-th from number `part` on is computed; the rows of the others are zeros.
        """
        batches = self._eval_batches(tokens)
        found: Tensor | None = None
        for index in batches[part::parts] or batches[:1]:
            with self._precision():
                logits = self._model(x[None], self._inputs(tokens, index)).cpu()
            found = logits.new_zeros(len(tokens.lengths), logits.shape[1]) if found is None else found
            found[index] = logits
        assert found is not None, "evaluation needs at least one sample"
        return found if part < len(batches) else torch.zeros_like(found)

    def _eval_batches(self, tokens: Tokens) -> list[Tensor]:
        order = np.argsort(tokens.lengths.numpy(), kind="stable")[::-1].copy()
        batches, begin = [], 0
        while begin < len(order):
            rows = max(1, EVAL_TOKENS[self.device.type] // int(tokens.lengths[order[begin]]))
            batches.append(torch.from_numpy(order[begin : begin + rows]))
            begin += rows
        return batches

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self._lengths.max())

    def pass_tokens(self, clients: Sequence[int], steps: int) -> int:
        """Padded tokens of the largest pass that these clients make together in the first `steps` steps of round 0."""
        largest = 0
        for step in range(steps):
            batches = [self._batches.indices(client, 0, step) for client in clients]
            cut = micro_batches(batches, self._lengths, overhead=self._overhead, slices=self.slices)
            largest = max(largest, *(micro.samples.numel() * micro.length for micro in cut))
        return largest

    def kept_bytes(self, rows: int) -> int:
        """Bytes that autograd keeps between forward and backward pass of the longest sample, taken `rows` times."""
        kept: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        X = self._x0[None].clone().requires_grad_()
        index = torch.full((rows,), int(self._lengths.argmax()))
        keys = row_keys(self._seed, 0, 0, [0], torch.arange(rows)[None]).to(self.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value), self._precision():
            self._model(X, self._inputs(self._tokens, index), keys)
        weights = self._model.model
        ours = {value.untyped_storage().data_ptr() for value in (*weights.parameters(), *weights.buffers())}
        return sum(size for storage, size in kept.items() if storage not in ours)

    def release(self) -> None:
        """Gives the model back, with its own forward."""
        self._model.release()

    def _backward(self, X: Tensor, micro: MicroBatch, counts: list[int], keys: Tensor | None) -> Tensor:
        """Adds a slice's part of the gradient to X.grad; returns its part of the losses [C]."""
        real = micro.samples >= 0
        index = torch.where(real, micro.samples, self._shortest).reshape(-1)
        inputs = self._inputs(self._tokens, index, real.reshape(-1), micro.length)
        weight = (real / torch.tensor(counts)[:, None]).to(X.device, X.dtype)
        labels = self._tokens.labels[index].to(X.device)
        with self._precision():
            logits = self._model(X, inputs, None if keys is None else keys.to(X.device))
        if self._regression:
            loss = F.mse_loss(logits[:, 0], labels.float(), reduction="none")
        else:
            loss = F.cross_entropy(logits, labels, reduction="none")
        losses = (loss.view_as(weight) * weight).sum(dim=1)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach()

    def _inputs(
        self, tokens: Tokens, index: Tensor, real: Tensor | None = None, length: int | None = None
    ) -> dict[str, Tensor]:
        """Padded model inputs of these samples; rows that are not `real` attend to their first token only."""
        inputs = tokens.rows(index, length=length, pad_id=self._pad_id)
        if real is not None and not bool(real.all()):
            inputs["attention_mask"][~real, 1:] = 0
        return {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)


def _grad(X: Tensor) -> Tensor:
    assert X.grad is not None
    return X.grad
