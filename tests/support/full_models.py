"""Small models whose weights are all trained, over random pixels and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from fedllm.data.client_batches import ClientBatches
from fedllm.data.tokenization import Tokens
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.full.samples import Samples
from fedllm.problems.full.settings import FullSettings

CLASSES = 3
LENGTHS = [4, 9, 7, 4, 5, 12, 4, 5, 6, 8]
cross_entropy = partial(F.cross_entropy, reduction="none")


@dataclass(frozen=True)
class Pixels:
    """n random square images with targets 0, 1, 2, 0, ...; augment: keys make them darker."""

    values: Tensor
    augment: bool = False

    @classmethod
    def draw(cls, count: int, side: int = 8) -> Pixels:
        return cls(torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1)))

    @property
    def targets(self) -> Tensor:
        return torch.arange(len(self)) % CLASSES

    @property
    def lengths(self) -> Tensor:
        return torch.full((len(self),), self.values[0, 0].numel())

    @property
    def sizes(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.long)

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, indices: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        light = 1.0 if keys is None or not self.augment else (keys.double() % 7 + 1)[:, None, None, None].float()
        return {"pixel_values": self.values[indices] / light}


class SmallNet(nn.Module):
    """A convolution, an optional batch norm and dropout, and a linear layer."""

    def __init__(self, *, norm: bool = True, rate: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(4 * 64, CLASSES)

    def forward(self, pixel_values: Tensor) -> Any:
        hidden = self.norm(self.convolution(pixel_values)).relu()
        return SimpleNamespace(logits=self.classifier(self.dropout(hidden.flatten(1))))


def seeded(make: Any, *arguments: Any, **options: Any) -> nn.Module:
    """A module whose random values are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make(*arguments, **options)  # type: ignore[no-any-return]


def small_net(**options: Any) -> nn.Module:
    return seeded(SmallNet, **options)


def resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=CLASSES,
        downsample_in_first_stage=False,
    )  # fmt: skip
    return seeded(ResNetForImageClassification, config)


def bert(dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, num_labels=CLASSES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return seeded(BertForSequenceClassification, config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    return seeded(GPT2LMHeadModel, config)


def tokens(*, learned: bool = False) -> Tokens:
    """Ten samples of LENGTHS; with `learned` about half of the tokens are, at least the last one of each sample."""
    ends = torch.tensor([0, *np.cumsum(LENGTHS)])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (int(ends[-1]),), dtype=torch.int32, generator=draw)
    mask = torch.rand(len(ids), generator=draw) < 0.5
    mask[ends[:-1]], mask[ends[1:] - 1] = False, True
    return Tokens(ids, None, ends, torch.arange(len(LENGTHS)) % CLASSES, mask if learned else None)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """The losses of a causal language model."""
    return outputs[:, 0]


def full_problem(
    model: nn.Module,
    samples: Samples,
    clients: int = 2,
    batch_size: int = 3,
    *,
    steps: int | None = None,
    **options: Any,
) -> FullProblem:
    """Clients that hold every `clients`-th sample. options: of FullSettings."""
    parts = [np.arange(client, len(samples), clients) for client in range(clients)]
    batches = ClientBatches(parts, batch_size=batch_size, epochs=None if steps else 1, steps=steps, seed=0)
    losses = summed if getattr(samples, "learned", None) is not None else cross_entropy
    return FullProblem(model, samples, batches, losses, FullSettings(**options))
