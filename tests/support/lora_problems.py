"""Small PEFT models and LoRA problems over random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tiny_models import save_tiny

from fedllm.data.client_batches import ClientBatches
from fedllm.data.tokenization import Tokens
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.heads import sequence_head

LENGTHS = [4, 30, 25, 4, 4, 28, 4, 5, 22, 4, 4, 4]
cross_entropy = partial(F.cross_entropy, reduction="none")


def adapted(
    folder: Path, family: str, *, targets: Sequence[str] = ("query", "value"), train: Any = "AB", **settings: Any
) -> Any:
    """A tiny PEFT model with three outputs.

    settings: `rate` and `quantize` for ModelSettings' dropout and quantize, `scaling` and `dora` for LoraSettings; the
    others change the checkpoint's config.
    """
    kind = {"scaling": settings.pop("scaling", "standard"), "dora": settings.pop("dora", False)}
    model = {"dropout": settings.pop("rate", None), "quantize": settings.pop("quantize", "none")}
    name = save_tiny(folder, family, **settings)
    backbone = load_backbone(ModelSettings(name=name, **model), sequence_head(3))
    return attach_lora(backbone, LoraSettings(rank=2, alpha=4, targets=list(targets), train=train, **kind))


def tokens_of(lengths: Sequence[int]) -> Tokens:
    """Samples of these lengths with random tokens and targets 0, 1, 2, 0, ..."""
    ends = torch.tensor([0, *np.cumsum(lengths)])
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 24, (int(ends[-1]),), dtype=torch.int32, generator=draw)
    return Tokens(ids, None, ends, torch.arange(len(lengths)) % 3)


def problem_of(model: Any, losses: Callable[..., torch.Tensor] = cross_entropy, **settings: Any) -> LoraProblem:
    """Three clients of four samples. settings: of EngineSettings; pad_id 1 unless told otherwise."""
    parts = [np.arange(client, len(LENGTHS), 3) for client in range(3)]
    batches = ClientBatches(parts, batch_size=4, epochs=1, steps=None, seed=0)
    return LoraProblem(model, tokens_of(LENGTHS), batches, losses, EngineSettings(**{"pad_id": 1, **settings}))
