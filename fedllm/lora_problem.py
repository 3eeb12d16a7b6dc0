"""The Problem of production: clients fine-tune LoRA adapters and a task head over one shared frozen base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedllm.agreement import Trial
from fedllm.batches import ClientBatches, MicroBatch, micro_batches, whole
from fedllm.blocks import BlockPartition
from fedllm.cohort import CohortModel
from fedllm.dropout import row_keys
from fedllm.errors import UserError
from fedllm.lora import base_model
from fedllm.masks import is_causal
from fedllm.memory import Waves
from fedllm.packing import Layout, Packed, find_layout, look_back, pack
from fedllm.problem import Problem
from fedllm.profile import section
from fedllm.quantised import lower, settle
from fedllm.space import ParameterSpace
from fedllm.tokens import Tokens, send

# Padded tokens that one more slice costs as much as, by device: what a pass pays however small it is.
SLICE_OVERHEAD = {"cpu": 64.0, "cuda": 4096.0}


class LoraProblem(Problem):
    """gradient(X [C, d]) of C clients, as many of them in one forward and backward of the base as `pass_bytes` allows.

    model: a PEFT model whose trainable parameters, in their order, are the flat vector; the model is taken over (see
    CohortModel). tokens: the training samples. batches: who takes which. regression: squared error instead of
    cross-entropy. autocast: dtype of the matrix products, None for the model's own. slices: padded, length-sorted
    slices a batch; None: rows packed with several samples, or where the model does not take them, the best cut.
    pass_bytes: what a pass may keep for its backward, or an evaluation batch would; a client alone may keep more.
    checkpointing: a pass keeps the inputs of the model's blocks only and computes these again, one at a time. The loss
    of a client is the mean over its own samples; padding has no weight.
    Raises UserError for a model that cannot be trained so.

    fixed_bytes, token_bytes: what a pass keeps however small it is, and of each token. pass_tokens: of a pass at most.
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
        pass_bytes: float = math.inf,
        checkpointing: bool = False,
        blocks: BlockPartition | None = None,
        pad_id: int = 0,
    ) -> None:
        self.space = ParameterSpace.of(model)
        self.dim, self.num_clients, self.blocks = self.space.dim, len(batches.parts), blocks
        self._x0 = self.space.gather(model)
        self.device = self._x0.device
        settle(model.eval(), autocast)
        trial = Trial(model, self.space, tokens)
        self._model = CohortModel(model, self.space)
        self._tokens, self._batches = tokens, batches
        self._lengths = tokens.lengths.numpy()
        self._shortest = int(self._lengths.argmin())
        self._regression, self._seed, self.slices, self._pad_id = regression, seed, slices, pad_id
        self._autocast, self._causal = autocast, is_causal(model)
        self.layers = int(getattr(model.config, "num_hidden_layers", 1))
        self._overhead = SLICE_OVERHEAD[self.device.type]
        self._exact = all(value.dtype == torch.float32 for value in model.parameters())
        self._tolerance = 0.001 if self._exact else 0.3
        trial.compare(lambda X, index: self._model(X, self._inputs(tokens, index)), self._tolerance)
        self._layout = self._find_layout(model)
        self.layout = self._layout if slices is None else None
        lower(model, autocast)
        self.fixed_bytes, self.token_bytes = self._kept()
        if checkpointing:
            self._checkpoint()
        self.pass_tokens = pass_bytes / self.token_bytes
        self.eval_cuts = 1

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
        losses, gradients = torch.zeros(len(clients), device=X.device), torch.empty_like(X)
        for some in self._passes(batches):
            keys = partial(row_keys, self._seed, round, step, clients[some])
            counts = [len(batch) for batch in batches[some]]
            losses[some], gradients[some] = self._pass(X[some], batches[some], counts, keys)
        return losses, gradients

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        """Gradients [C, d] of the clients' mean losses over all their samples, without dropout."""
        falling = sorted(range(len(clients)), key=lambda row: -len(self._batches.parts[clients[row]]))
        parts = [self._batches.parts[clients[row]] for row in falling]
        gradients = torch.zeros(len(clients), self.dim, device=x.device)
        for begin in range(0, len(parts[0]), size := self._batches.batch_size):
            batches = [part[begin : begin + size] for part in parts if begin < len(part)]
            for some in self._passes(batches):
                X, counts = x.repeat(len(batches[some]), 1), [len(part) for part in parts[some]]
                gradients[some] += self._pass(X, batches[some], counts, None)[1]
        return gradients[np.argsort(falling)]

    def _passes(self, batches: list[np.ndarray]) -> Iterator[slice]:
        """Runs of clients with together at most pass_tokens tokens, each at least one client."""
        begin = tokens = 0
        for client, size in enumerate(self._pass_sizes(batches)):
            if begin < client and tokens + size > self.pass_tokens:
                yield slice(begin, client)
                begin, tokens = client, 0
            tokens += size
        yield slice(begin, len(batches))

    def _pass_sizes(self, batches: list[np.ndarray]) -> list[int]:
        """Tokens that each client takes of a pass, most of its padding included: whole rows as long as the longest."""
        longest = max(int(self._lengths[batch].max()) for batch in batches)
        if self.layout is None:
            return [longest * -(-max(map(len, batches)) // (self.slices or 1))] * len(batches)
        tokens = [longest * -(-int(self._lengths[batch].sum()) // longest) for batch in batches]
        return [max(tokens)] * len(batches) if self._equal_rows else tokens

    def _pass(
        self, X: Tensor, batches: list[np.ndarray], counts: list[int], keys: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Losses [C] and gradients [C, d] of some clients: one pass over packed rows, or one a slice of padded ones.

        counts [C]: samples that a client's mean is over. keys: dropout keys of slots [C, m], None for no dropout.
        """
        with section("data"):
            if self.layout is not None:
                micros = [whole(batches, self._lengths)]
            else:
                micros = micro_batches(batches, self._lengths, overhead=self._overhead, slices=self.slices)
        X = X.detach().requires_grad_()
        losses = torch.zeros(len(counts), device=X.device)
        for micro in micros:
            logits = self._forward(X, micro, keys)
            losses += self._descend(logits, micro.samples, counts)
        assert X.grad is not None
        return losses, X.grad

    def _forward(self, X: Tensor, micro: MicroBatch, keys: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Logits of a slice's samples [C * m]."""
        with section("data"):
            drops = None if keys is None else send(keys(micro.slots), X.device)
            if self.layout is not None:
                samples = micro.samples.numpy()
                rows = pack(self._tokens, samples, self.layout, equal=self._equal_rows, pad_id=self._pad_id)
                rows = rows.to(X.device)
            else:
                real = micro.samples >= 0
                index = torch.where(real, micro.samples, self._shortest).reshape(-1)
                inputs = self._inputs(self._tokens, index, real.reshape(-1), micro.length)
        with section("forward"), self._precision():
            return self._model.packed(X, rows, drops) if self.layout is not None else self._model(X, inputs, drops)

    @property
    def _equal_rows(self) -> bool:
        """Equal rows make batched products of the adapters, which a GPU and bfloat16 want; a CPU rather loops."""
        return self.device.type != "cpu" or self._autocast is not None or not self._exact

    @torch.no_grad()
    def _find_layout(self, model: nn.Module) -> Layout | None:
        if self._lengths.max() > look_back(model):
            return None
        x = self._x0[None]

        def padded(index: Tensor) -> Tensor:
            return self._model(x, self._inputs(self._tokens, index))

        def packed(rows: Packed) -> Tensor:
            return self._model.packed(x, rows.to(self.device))

        return find_layout(model, self._tokens, padded, packed, self._tolerance, self._pad_id)

    @torch.no_grad()
    def logits(self, x: Tensor, tokens: Tokens, part: int = 0, parts: int = 1) -> Tensor:
        """Logits [n, labels] (float32, CPU) of all samples at x [d], in large length-sorted batches.

        Of these batches only every `parts`-th from number `part` on is computed; the rows of the others are zeros.
        Where memory gives out, this batch and all after it are cut into more parts, eval_cuts. Raises RunError where a
        sample alone does not fit.
        """

        def work(index: list[int]) -> Tensor:
            with self._precision():
                return self._model(x[None], self._inputs(tokens, torch.tensor(index))).cpu()

        def too_large(sample: int) -> str:
            return (
                f"evaluation: a sample of {int(tokens.lengths[sample])} tokens alone does not fit into memory; lower "
                f"data.max_length, or run fewer processes on this machine"
            )

        batches = self._eval_batches(tokens)
        found: Tensor | None = None
        for batch in batches[part::parts] or batches[:1]:
            waves = Waves(batch, -(-len(batch) // self.eval_cuts), too_large)
            for index, logits in waves.each(work):
                found = logits.new_zeros(len(tokens), logits.shape[1]) if found is None else found
                found[index] = logits
            if waves.forced:
                self.eval_cuts = -(-len(batch) // waves.forced)
        assert found is not None, "evaluation needs at least one sample"
        return found if part < len(batches) else torch.zeros_like(found)

    def _eval_batches(self, tokens: Tokens) -> list[list[int]]:
        order = np.argsort(tokens.lengths.numpy(), kind="stable")[::-1].tolist()
        batches = []
        while order:
            rows = max(1, int(min(len(order), self.pass_tokens / int(tokens.lengths[order[0]]))))
            batches.append(order[:rows])
            order = order[rows:]
        return batches

    def cut(self, slices: int | None) -> None:
        """From now on `slices` as they were given to __init__."""
        self.slices, self.layout = slices, None if slices else self._layout

    def largest_pass(self, clients: Sequence[int], steps: int) -> int:
        """Tokens of the largest pass that these clients make together in the first `steps` steps of round 0."""
        largest = 0
        for step in range(steps):
            batches = [self._batches.indices(client, 0, step) for client in clients]
            sizes = self._pass_sizes(batches)
            largest = max(largest, *(sum(sizes[some]) for some in self._passes(batches)))
        return largest

    def _checkpoint(self) -> None:
        """From now on blocks keep their inputs; at its fullest a pass has one block's activations beside these."""
        if not self._model.blocks:
            kind = type(base_model(self._model.model)).__name__
            raise UserError(
                f"run.gradient_checkpointing: {kind} has no layers that transformers can checkpoint; leave it false, "
                f"and cut batches with run.slices instead"
            )
        whole = self.token_bytes
        self._model.checkpointing = True
        self.fixed_bytes, self.token_bytes = self._kept()
        self.token_bytes += whole / self._model.blocks

    def _kept(self) -> tuple[int, float]:
        """Bytes that a pass keeps however small it is, and of each token."""
        one, two = (self._kept_bytes(rows) for rows in (1, 2))
        return 2 * one - two, (two - one) / int(self._lengths.max())

    def _kept_bytes(self, rows: int) -> int:
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

    def _descend(self, logits: Tensor, samples: Tensor, counts: list[int]) -> Tensor:
        """Backward of the samples' part of the clients' mean losses; returns that part [C].

        samples [C, m], -1 for none. counts [C]: samples that a client's mean is over.
        """
        with section("data"):
            real = samples >= 0
            weight = send((real / torch.tensor(counts)[:, None]).to(logits.dtype), logits.device)
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
