"""How the weights of the frozen base are stored: bitsandbytes layers, and matrices under autocast."""

from __future__ import annotations

import logging
import sys

import torch
from peft import PeftModel
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fedllm.models.settings import ModelSettings
from fedllm.models.structure import attentions, output_modules


def quantization_config(model: ModelSettings, skeleton: PreTrainedModel, dtype: torch.dtype) -> BitsAndBytesConfig:
    """The quantisation settings: 4 bit (NF4, scales in 8 bit) or 8 bit.

    skeleton: the model without values. dtype: of the products of 4-bit layers. What makes the outputs is not quantised:
    a head that is trained, or the output embedding of a language model. Neither is a fused query/key/value projection,
    because `split_fused` splits its weight.
    """
    fused = [attention.query for attention in attentions(skeleton, model.name) if attention.fused]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=model.quantize == "4bit",
        load_in_8bit=model.quantize == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_threshold=0.0,  # 0: outlier columns are found over the whole batch, which mixes clients
        llm_int8_skip_modules=[*output_modules(skeleton), *fused],
    )


def settle(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Makes a model's 4-bit and 8-bit layers compute the same in training and in evaluation.

    dtype: the dtype of the 4-bit layers' products, or None for that of the base.

    The layers are set to training mode, which changes only their arithmetic. In eval mode on a CPU, an 8-bit layer also
    rounds its input to 8 bit. A 4-bit layer repacks its weights if the CPU supports bfloat16.
    """
    if (bnb := sys.modules.get("bitsandbytes")) is None:  # not imported: no such layers
        return
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # an 8-bit layer logs the dtypes of each product
    for module in model.modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            module.train()
            if dtype is not None and isinstance(module, bnb.nn.Linear4bit):
                module.compute_dtype = dtype


def keep_as_stored(model: nn.Module) -> None:
    """Prevents bitsandbytes from repacking 4-bit weights.

    On a CPU with fast bfloat16 products, bitsandbytes repacks them with rounded scales in the first forward pass
    without gradients. It fails for layers that are narrower than a block of scales.
    """
    if (bnb := sys.modules.get("bitsandbytes")) is None:
        return
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def lower(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Converts the frozen float32 matrices to `dtype`; None leaves them unchanged.

    Autocast would convert them again in every forward pass. Products have the same bits, and the matrices need less
    memory (half with bfloat16). A token embedding that is also the output embedding is converted with it; then hidden
    states begin in `dtype` too. Matrices that are trained stay as they are, tied or not.
    """
    for module in model.modules() if dtype is not None else ():
        frozen = not any(value.requires_grad for value in module.parameters(recurse=False))
        if isinstance(module, nn.Linear | Conv1D) and frozen and module.weight.dtype == torch.float32:
            module.to(dtype)


def frozen_size(model: nn.Module, dim: int) -> tuple[int, int]:
    """The number of frozen parameters and their bytes, for a model with `dim` trainable float32 values.

    A packed 4-bit weight counts as the parameters that it encodes. The scales of its blocks are not counted.
    """
    if isinstance(model, PeftModel):
        _, everything = model.get_nb_trainable_parameters()
    else:
        everything = sum(value.numel() for value in model.parameters())
    return everything - dim, sum(value.nbytes for value in model.parameters()) - 4 * dim
