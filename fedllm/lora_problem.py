"""The Problem of production: clients fine-tune LoRA adapters and a task head over one shared frozen base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedllm.batches import ClientBatches, MicroBatch, aligned, micro_batches
from fedllm.blocks import BlockPartition
from fedllm.cohort import CohortModel
from fedllm.dropout import row_keys
from fedllm.masks import is_causal
from fedllm.packing import Layout, Packed, find_layout, pack
from fedllm.problem import Problem
from fedllm.profile import section
from fedllm.quantised import lower, settle
from fedllm.space import ParameterSpace
from fedllm.tokens import Tokens, send

# Padded tokens that one more slice costs as much as, by device: what a pass pays however small it is.
SLICE_OVERHEAD = {"cpu": 64.0, "cuda": 4096.0}
# Tokens of a pass over packed rows, unless a client's batch alone has more. On a CPU larger ones only take more memory.
PASS_TOKENS = {"cpu": 2048, "cuda": 131072}
# Tokens of an evaluation batch. On a CPU more than this leave its caches (benchmarks/RESULTS.md, Profile).
EVAL_TOKENS = {"cpu": 1024, "cuda": 131072}


class LoraProblem(Problem):
    """gradient(X [C, d]) of C clients in one forward and backward of the base a slice.

    model: a PEFT model whose trainable parameters, in their order, are the flat vector; the model is taken over (see
    CohortModel). tokens: the training samples. batches: who takes which. regression: squared error instead of
    cross-entropy. autocast: dtype of the matrix products, None for the model's own. slices: padded, length-sorted
    slices a batch; None: rows packed with several samples, or where the model does not take them, the best cut. The
    loss of a client is the mean over its own samples; padding has no weight.
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
        settle(model, autocast)
        self._tokens, self._batches = tokens, batches
        self._lengths = tokens.lengths.numpy()
        self._shortest = int(self._lengths.argmin())
        self._regression, self._seed, self.slices, self._pad_id = regression, seed, slices, pad_id
        self._autocast, self._causal = autocast, is_causal(model)
        self._overhead = SLICE_OVERHEAD[self.device.type]
        self._exact = all(value.dtype == torch.float32 for value in model.parameters())
        self._layout = self._find_layout(model)
        self.layout = self._layout if slices is None else None
        lower(model, autocast)

    def initial(self) -> Tensor:
        return self._x0.clone()

    def steps(self, clients: Sequence[int], round: int) -> Tensor:
        return torch.tensor([self._batches.steps(client) for client in clients])

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([float(len(self._batches.parts[client])) for client in clients])

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        with section("data"):
            batches = [self._batches.indices(client, round, step) for client in clients]
        if self.layout is not None:
            return self._packed(X, batches, clients, round, step)
        with section("data"):
            micros = micro_batches(batches, self._lengths, overhead=self._overhead, slices=self.slices)
        X = X.detach().requires_grad_()
        losses = torch.zeros(len(clients), device=X.device)
        for micro in micros:
            with section("data"):
                keys = row_keys(self._seed, round, step, clients, micro.slots)
            losses += self._backward(X, micro, [len(batch) for batch in batches], keys)
        return losses, _grad(X)

    def _packed(
        self, X: Tensor, batches: list[np.ndarray], clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """loss_and_gradient over packed rows, some clients at a time."""
        assert self.layout is not None
        losses, gradients = torch.zeros(len(clients), device=X.device), torch.empty_like(X)
        for part in self._passes(batches):
            with section("data"):
                samples = aligned(batches[part])
                rows = pack(self._tokens, samples, self.layout, equal=self._equal_rows, pad_id=self._pad_id)
                rows = rows.to(X.device)
                slots = torch.arange(samples.shape[1]).expand(samples.shape)
                keys = send(row_keys(self._seed, round, step, clients[part], slots), X.device)
            leaves = X[part].detach().requires_grad_()
            with section("forward"), self._precision():
                logits = self._model.packed(leaves, rows, keys)
            losses[part] = self._descend(logits, torch.from_numpy(samples))
            gradients[part] = _grad(leaves)
        return losses, gradients

    def _passes(self, batches: list[np.ndarray]) -> Iterator[slice]:
        """Runs of clients with together at most PASS_TOKENS tokens, each at least one client."""
        begin = tokens = 0
        for client, batch in enumerate(batches):
            tokens += (size := int(self._lengths[batch].sum()))
            if begin < client and tokens > PASS_TOKENS[self.device.type]:
                yield slice(begin, client)
                begin, tokens = client, size
        yield slice(begin, len(batches))

    @property
    def _equal_rows(self) -> bool:
        """Equal rows make batched products of the adapters, which a GPU and bfloat16 want; a CPU rather loops."""
        return self.device.type != "cpu" or self._autocast is not None or not self._exact

    @torch.no_grad()
    def _find_layout(self, model: nn.Module) -> Layout | None:
        x = self._x0[None]

        def padded(index: Tensor) -> Tensor:
            return self._model(x, self._inputs(self._tokens, index))

        def packed(rows: Packed) -> Tensor:
            return self._model.packed(x, rows.to(self.device))

        return find_layout(model, self._tokens, padded, packed, tolerance=0.01 if self._exact else 0.3)

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

    def cut(self, slices: int | None) -> None:
        """From now on `slices` as they were given to __init__."""
        self.slices, self.layout = slices, None if slices else self._layout

    def pass_tokens(self, clients: Sequence[int], steps: int) -> int:
        """Padded tokens of the largest pass that these clients make together in the first `steps` steps of round 0."""
        largest = 0
        for step in range(steps):
            batches = [self._batches.indices(client, 0, step) for client in clients]
            if self.layout is not None:
                found = [sum(int(self._lengths[b].sum()) for b in batches[part]) for part in self._passes(batches)]
            else:
                parts = micro_batches(batches, self._lengths, overhead=self._overhead, slices=self.slices)
                found = [micro.samples.numel() * micro.length for micro in parts]
            largest = max(largest, *found)
        return largest

    def kept_bytes(self, rows: int) -> int:
        """Bytes that autograd keeps between forward and backward pass of the longest sample, taken `rows` times."""
        kept: dict[int, int] = {}

        def keep(value: Tensor) -> Tensor:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        X = self._x0[None].clone().requires_grad_()
        index = torch.full((rows,), int(self._lengths.argmax()))
        keys = row_keys(self._seed, 0, 0, [0], torch.arange(rows)[None]).to(self.device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), self._precision():
            self._model(X, self._inputs(self._tokens, index), keys)
        weights = self._model.model
        ours = {value.untyped_storage().data_ptr() for value in (*weights.parameters(), *weights.buffers())}
        return sum(size for storage, size in kept.items() if storage not in ours)

    def release(self) -> None:
        """Gives the model back, with its own forward."""
        self._model.release()

    def _backward(self, X: Tensor, micro: MicroBatch, counts: list[int], keys: Tensor | None) -> Tensor:
        """Adds a slice's part of the gradient to X.grad; returns its part of the losses [C]."""
        with section("data"):
            real = micro.samples >= 0
            index = torch.where(real, micro.samples, self._shortest).reshape(-1)
            inputs = self._inputs(self._tokens, index, real.reshape(-1), micro.length)
        with section("forward"), self._precision():
            logits = self._model(X, inputs, None if keys is None else send(keys, X.device))
        return self._descend(logits, micro.samples, counts)

    def _descend(self, logits: Tensor, samples: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Backward of the clients' mean losses; returns the losses [C].

        samples [C, m], -1 for none. counts [C]: samples that a client's mean is over, None for those given.
        """
        with section("data"):
            real = samples >= 0
            sizes = real.sum(dim=1) if counts is None else torch.tensor(counts)
            weight = send((real / sizes[:, None]).to(logits.dtype), logits.device)
            labels = send(self._tokens.labels[samples.clamp(min=0).reshape(-1)], logits.device)
        with section("forward"):
            if self._regression:
                loss = F.mse_loss(logits[:, 0], labels.float(), reduction="none")
            else:
                loss = F.cross_entropy(logits, labels, reduction="none")
            losses = (loss.view_as(weight) * weight).sum(dim=1)
        with section("backward"):
            losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach()

    def _inputs(
        self, tokens: Tokens, index: Tensor, real: Tensor | None = None, length: int | None = None
    ) -> dict[str, Tensor]:
        """Padded model inputs of these samples; rows that are not `real` attend to their first token only.

        There is no attention mask where all tokens are real, unless the model is causal (see `fedllm.masks`).
        """
        inputs = tokens.rows(index, length=length, pad_id=self._pad_id)
        mask = inputs["attention_mask"]
        if real is not None:
            mask[~real, 1:] = 0
        if not self._causal and bool(mask.all()):
            del inputs["attention_mask"]
        return {name: send(value, self.device) for name, value in inputs.items()}

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, dtype=self._autocast)


def _grad(X: Tensor) -> Tensor:
    assert X.grad is not None
    return X.grad
