"""A model's modules and the shapes of its weights, without values: from its config alone, for any model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from fedllm.blocks.attention import features
from fedllm.common import hub
from fedllm.common.errors import UserError
from fedllm.common.quiet import quiet
from fedllm.models.lora import shortest_suffixes
from fedllm.models.settings import ModelSettings
from fedllm.models.sources import ask_hub, cached_folder, find_model
from fedllm.models.structure import find_head


def load_outline(name: str) -> PreTrainedModel:
    """The model called `name` (see `fedllm.common.hub`) on the meta device.

    It has the head of a classifier of two classes, if transformers has one for texts; else the head that its config
    names, or none. Neither weights nor a tokenizer are read. Raises UserError with the whole cause.
    """
    place = hub.find_local("models", name)
    found = None if place is None else find_model(place, ModelSettings(name=name, pretrained=False))
    try:
        with quiet(), torch.device("meta"):
            return _build(_config(name, found))
    except UserError:
        raise
    except Exception as cause:  # transformers and the models' own code raise many types
        reason = str(cause).strip() or type(cause).__name__
        raise UserError(f"model '{name}' (from {found or 'hub'}) cannot be built from its config: {reason}") from cause


def _config(name: str, found: Path | None) -> PreTrainedConfig:
    options: dict[str, Any] = {"trust_remote_code": False}
    if found is None:
        cached = cached_folder(name)
        if cached is None:
            ask_hub(name, None)
        where = cached or name
    elif found.suffix == ".gguf":
        where, options = str(found.parent), {**options, "gguf_file": found.name}
    else:
        where = str(found)
    config: PreTrainedConfig = AutoConfig.from_pretrained(where, **options)
    return config


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        config.num_labels = 2
        return _from_config(AutoModelForSequenceClassification, config)
    named = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ())
    cls = next((cls for cls in named if isinstance(cls, type) and issubclass(cls, PreTrainedModel)), None)
    return cls(config) if cls else _from_config(AutoModel, config)


def _from_config(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    return model


def highest_rank(model: PreTrainedModel, targets: Sequence[str]) -> int:
    """The smallest side of the target layers."""
    return min(min(sides) for path in targets if (sides := features(model.get_submodule(path))))


def add_lora(model: PreTrainedModel, targets: Sequence[str], rank: int) -> PeftModel:
    """The model with LoRA on the target layers; the head of a classifier is trained with it."""
    endings = shortest_suffixes(targets, [path for path, _ in model.named_modules()])
    config = LoraConfig(r=rank, target_modules=endings, modules_to_save=list(_trained_head(model)) or None)
    with quiet():
        adapted = get_peft_model(model.requires_grad_(False), config)
    assert isinstance(adapted, PeftModel)
    return adapted


def _trained_head(model: PreTrainedModel) -> tuple[str, ...]:
    """The head of a classifier. A model without a base model inside it has none."""
    prefix = model.base_model_prefix
    return find_head(model) if prefix and hasattr(model, prefix) else ()
