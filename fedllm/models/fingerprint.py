"""A digest that differs between models that must not be trained together."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLE = 1024  # values per frozen tensor that enter the digest


def fingerprint(model: nn.Module) -> str:
    """A digest of everything that must be equal in the models of all sites; "" for a model without values.

    Frozen weights enter in bfloat16, so that sites may store them in bfloat16 or float32. The original head, which
    PEFT replaces by a trainable copy, does not enter.
    """
    if any(value.is_meta for value in model.parameters()):
        return ""
    found = hashlib.sha256()
    for name, module in model.named_modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):  # a LoRA layer
            found.update(f"{name} {scaling}\n".encode())
    for name, value in model.named_parameters():
        if value.requires_grad:
            found.update(f"{name} {list(value.shape)}\n".encode())
        elif value.is_floating_point() and ".original_module." not in name:
            some = value.detach().reshape(-1)[:: value.numel() // _SAMPLE + 1].to("cpu", torch.bfloat16)
            found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]
