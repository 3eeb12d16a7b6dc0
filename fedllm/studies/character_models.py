"""Character-level language models and a Problem that trains them, small enough for exact Hessians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from fedllm.blocks import BlockPartition, partition
from fedllm.common.seeding import derive, torch_rng
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.structure import split_fused
from fedllm.problems.base import Problem

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WINDOW = 24  # input characters of a sample
CONTEXT = 8  # characters that the MLP reads


def encode(texts: Sequence[str]) -> Tensor:
    """Encodes texts as one stream of ids, int64: lower-case letters; a run of other characters becomes one space."""
    kept = "".join(c if c in ALPHABET else " " for c in " ".join(texts).lower())
    return torch.tensor([ALPHABET.index(c) for c in f" {' '.join(kept.split())}"])


class Transformer(nn.Module):
    """GPT-2 with one layer, 4 heads, width 16, an MLP of width 32, and an output layer not tied to the embedding."""

    weights: ClassVar[dict[str, str]] = {
        "embedding": "gpt2.transformer.wte.weight",
        "query": "gpt2.transformer.h.0.attn.c_attn.query.weight",
        "key": "gpt2.transformer.h.0.attn.c_attn.key.weight",
        "value": "gpt2.transformer.h.0.attn.c_attn.value.weight",
        "projection": "gpt2.transformer.h.0.attn.c_proj.weight",
        "MLP in": "gpt2.transformer.h.0.mlp.c_fc.weight",
        "MLP out": "gpt2.transformer.h.0.mlp.c_proj.weight",
        "output": "gpt2.lm_head.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=len(ALPHABET), n_positions=WINDOW, n_embd=16, n_layer=1, n_head=4, n_inner=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, use_cache=False,
            bos_token_id=0, eos_token_id=0, initializer_range=0.1,
        )  # fmt: skip
        config._attn_implementation = "eager"  # fused attention has no second derivative
        self.gpt2 = GPT2LMHeadModel(config)
        split_fused(self.gpt2, "gpt2")
        self.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        """[b, l] -> scores [b, l, characters] of the next character at each position."""
        scores: Tensor = self.gpt2(input_ids=ids).logits
        return scores


class MLP(nn.Module):
    """Predicts the next character from the last 8: embeddings of width 8, one hidden layer of 16 neurons."""

    weights: ClassVar[dict[str, str]] = {
        "embedding": "embedding.weight",
        "hidden": "hidden.weight",
        "output": "output.weight",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 8)
        self.hidden = nn.Linear(8 * CONTEXT, 16)
        self.output = nn.Linear(16, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        """[b, l] -> scores [b, l - 7, characters] of the next character, from position 8 on."""
        seen = self.embedding(ids.unfold(1, CONTEXT, 1)).flatten(2)
        scores: Tensor = self.output(nn.functional.gelu(self.hidden(seen)))
        return scores


MODELS: dict[str, type[Transformer | MLP]] = {"transformer": Transformer, "mlp": MLP}


class CharacterProblem(Problem):
    """Each client predicts the next character of its own texts; the loss is the mean cross entropy, in float64.

    blocks: the model's partition by role. streams: the character ids of each client. A batch is `batch_size` windows of
    a client's stream, drawn from (seed, round, client, step). A window that reaches the stream's end continues at its
    start.
    """

    blocks: BlockPartition

    def __init__(self, kind: str, streams: Sequence[Tensor], *, seed: int = 0, batch_size: int = 16) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "characters/init"))
            self.model = MODELS[kind]().double().eval()
        self.space = ParameterSpace.of(self.model)
        self.blocks = partition(self.model)
        self.dim, self.num_clients = self.space.dim, len(streams)
        self._streams, self._seed, self._batch_size = streams, seed, batch_size

    def initial(self) -> Tensor:
        return self.space.gather(self.model)

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        pairs = [self._one(x, client, round, step) for x, client in zip(X, clients, strict=True)]
        losses, gradients = zip(*pairs, strict=True)
        return torch.stack(losses), torch.stack(gradients)

    def probe(self, samples: int) -> Tensor:
        """Windows [N * samples, WINDOW + 1], `samples` per client: a small sample of the federation's objective."""
        rows = [self._windows(client, samples, "probe", client) for client in range(self.num_clients)]
        return torch.cat(rows)

    def loss(self, parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
        """Mean cross entropy of the windows [b, WINDOW + 1] under the named parameters."""
        scores = functional_call(self.model, parameters, windows[:, :-1])
        return cross_entropy(scores.flatten(0, 1), windows[:, -scores.shape[1] :].flatten())

    def _one(self, x: Tensor, client: int, round: int, step: int) -> tuple[Tensor, Tensor]:
        x = x.detach().clone().requires_grad_()
        parameters = {name: value[0] for name, value in self.space.views(x[None]).items()}
        loss = self.loss(parameters, self._windows(client, self._batch_size, "windows", round, client, step))
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    def _windows(self, client: int, count: int, purpose: str, *keys: int) -> Tensor:
        stream, rng = self._streams[client], torch_rng(self._seed, purpose, *keys)
        starts = torch.randint(len(stream), (count, 1), generator=rng)
        windows: Tensor = stream[(starts + torch.arange(WINDOW + 1)) % len(stream)]
        return windows
