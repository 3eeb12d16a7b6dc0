"""Models whose blocks are counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from tiny_models import CONFIGS
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING


def build(family: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[family](vocab_size=32, num_labels=2, **CONFIGS[family])
    return AutoModelForSequenceClassification.from_config(config)


def adapt(model: PreTrainedModel, *targets: str) -> nn.Module:
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, lora_alpha=4, target_modules=list(targets))
    return get_peft_model(model, config)


def context(model: Any, output: nn.Module) -> torch.Tensor:
    """What the heads give the output projection, [tokens, heads * head_dim]."""
    seen: list[torch.Tensor] = []
    hook = output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 12, 6, 9, 10, 4, 11]]))
    hook.remove()
    return seen[0].reshape(7, -1)
