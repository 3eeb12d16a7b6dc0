"""The weights of a frozen base, as a cohort needs them: bitsandbytes layers, and matrices under autocast."""

from __future__ import annotations

import logging
import sys

import torch
from peft import PeftModel
from torch import nn
from transformers.pytorch_utils import Conv1D


def settle(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Makes a model's 4-bit and 8-bit layers compute alike in training and evaluation, and 4-bit ones in `dtype`.

    They are set to training mode, which for them concerns arithmetic alone. In eval mode on a CPU an 8-bit layer rounds
    its input to 8 bit too, and a 4-bit one repacks its weights for bfloat16 where the CPU has it. dtype: of the
    products, None for that of the base.
    """
    if (bnb := sys.modules.get("bitsandbytes")) is None:  # a model with such layers has imported it
        return
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # an 8-bit layer tells of each product's dtypes
    for module in model.modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            module.train()
            if dtype is not None and isinstance(module, bnb.nn.Linear4bit):
                module.compute_dtype = dtype


def lower(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Keeps the frozen float32 matrices in `dtype`, to which autocast would cast them again in every pass: the same
    bits of every product, from half the memory. None: leaves them as they are."""
    for module in model.modules() if dtype is not None else ():
        frozen = not any(value.requires_grad for value in module.parameters(recurse=False))
        if isinstance(module, nn.Linear | Conv1D) and frozen and module.weight.dtype == torch.float32:
            module.to(dtype)


def frozen_size(model: PeftModel, dim: int) -> tuple[int, int]:
    """The frozen parameters of a model that trains `dim` float32 numbers: how many, and the bytes of their values.

    A packed 4-bit weight counts as the parameters it stands for; the scales of its blocks are not counted.
    """
    _, everything = model.get_nb_trainable_parameters()
    return everything - dim, sum(value.nbytes for value in model.parameters()) - 4 * dim
