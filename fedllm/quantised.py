"""The bitsandbytes layers of a frozen base, as a cohort needs them."""

from __future__ import annotations

import logging
import sys

import torch
from peft import PeftModel
from torch import nn


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


def frozen_size(model: PeftModel, dim: int) -> tuple[int, int]:
    """The frozen parameters of a model that trains `dim` float32 numbers: how many, and the bytes of their values.

    A packed 4-bit weight counts as the parameters it stands for; the scales of its blocks are not counted.
    """
    _, everything = model.get_nb_trainable_parameters()
    return everything - dim, sum(value.nbytes for value in model.parameters()) - 4 * dim
