"""Small language models over characters, and their federated training: a Problem whose exact Hessians are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from fedllm.blocks import BlockPartition, partition
from fedllm.parts import split_fused
from fedllm.problem import Problem
from fedllm.random import derive, torch_rng
from fedllm.space import ParameterSpace

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WINDOW = 24  # characters a sample predicts
CONTEXT = 8  # characters the MLP sees


def encode(texts: Sequence[str]) -> Tensor:
    """Texts as one stream of character ids, int64: lower-case letters, and one space for each run of all else."""
    kept = "".join(c if c in ALPHABET else " " for c in " ".join(texts).lower())
    return torch.tensor([ALPHABET.index(c) for c in f" {' '.join(kept.split())}"])


class Transformer(nn.Module):
    """GPT-2 with one layer of 4 heads, width 16, an MLP of 32, and an output layer of its own."""

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
        config._attn_implementation = "eager"  # the fused ones have no second derivative
        self.gpt2 = GPT2LMHeadModel(config)
        split_fused(self.gpt2, "gpt2")
        self.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        """[b, l] -> logits [b, l, characters] of the next character at each place."""
        logits: Tensor = self.gpt2(input_ids=ids).logits
        return logits


class MLP(nn.Module):
    """The next character from the last 8: embeddings of 8, one hidden layer of 16 neurons."""

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
        """[b, l] -> logits [b, l - 7, characters] of the next character from the eighth place on."""
        seen = self.embedding(ids.unfold(1, CONTEXT, 1)).flatten(2)
        logits: Tensor = self.output(nn.functional.gelu(self.hidden(seen)))
        return logits


MODELS: dict[str, type[Transformer | MLP]] = {"transformer": Transformer, "mlp": MLP}


class CharacterProblem(Problem):
    """Each client predicts the next character of its own texts; the loss is the mean cross entropy, in float64.

    blocks: the model's partition by role. streams: the character ids of each client. A batch is `batch_size` windows of
    a client's stream, which goes round, drawn from (seed, round, client, step).
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
        """Windows [N * samples, WINDOW + 1], as many of each client: the whole federation's objective in small."""
        rows = [self._windows(client, samples, "probe", client) for client in range(self.num_clients)]
        return torch.cat(rows)

    def loss(self, parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
        """Mean cross entropy of the windows [b, WINDOW + 1] under the named parameters."""
        logits = functional_call(self.model, parameters, windows[:, :-1])
        return cross_entropy(logits.flatten(0, 1), windows[:, -logits.shape[1] :].flatten())

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
