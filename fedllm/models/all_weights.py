"""A backbone made ready for training all of its weights, and a digest of what they start from."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

from fedllm.models.loading import Backbone
from fedllm.models.lora import start_head
from fedllm.models.norms import apply_norm
from fedllm.models.settings import ModelSettings


def train_all(backbone: Backbone, settings: ModelSettings, *, seed: int = 0) -> PreTrainedModel:
    """The backbone's model in float32 and eval mode with all weights trainable, in place.

    A new head starts from the values that it has beside adapters, see lora.attach_lora. settings.norm: see apply_norm.
    Raises UserError for a norm that the model cannot have.
    """
    model = backbone.model
    start_head(model, backbone, seed)
    apply_norm(model, settings.norm, backbone.name)
    nn.Module.float(model).requires_grad_(True).train(False)
    return model


def start_digest(x: torch.Tensor) -> str:
    """A digest of the values that training starts from, x [d]."""
    return hashlib.sha256(x.detach().cpu().numpy().tobytes()).hexdigest()
