"""Writes a model with its adapter merged into it as a plain transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from fedllm.common.errors import UserError
from fedllm.common.files import replaced_folder
from fedllm.common.quiet import quiet
from fedllm.models.adapter_files import CARD, Processor, save_processor
from fedllm.models.structure import SplitQKV, is_language_model


def merge(model: PeftModel) -> PreTrainedModel:
    """The base model with its adapted weights (see attach_lora) and with the trained head; `model` is used up.

    GPT-2's fused projections, which were taken apart for the adapter, are put together again. All weights have the
    dtype of the base: float32 gives the same outputs up to rounding, bfloat16 rounds the merged weights.
    Raises UserError for a quantised base, whose weights cannot hold the sum.
    """
    if getattr(model.get_base_model(), "is_quantized", False):
        raise UserError("the base model is quantised, and its weights cannot take up an adapter; export the adapter")
    merged: Any = model.merge_and_unload()
    for name, module in list(merged.named_modules()):
        if isinstance(module, SplitQKV):
            merged.set_submodule(name, module.fused())
    if is_language_model(merged):
        merged.config.use_cache = True  # which training turns off; without it, generation takes quadratic time
    return cast(PreTrainedModel, merged.to(merged.config.dtype or torch.float32))


def require_free(folder: Path) -> None:
    """Raises UserError unless a new folder can be made there: `folder` is missing, or is an empty folder."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise UserError(f"{folder}: exists already and is not empty, so it is not replaced; name another folder")


def save_merged(
    model: PeftModel, folder: str | Path, processor: Processor | None = None, card: str | None = None
) -> Path:
    """Merges a model (see `merge`) and writes it as a folder that from_pretrained reads without PEFT; its path.

    processor, card: see save_adapter. The folder appears when it is complete.
    Raises UserError for a quantised base or a folder that is not empty, OSError or RunError if it cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    require_free(folder)
    merged = merge(model)
    with replaced_folder(folder) as aside:
        with quiet():
            merged.save_pretrained(str(aside))
        if processor is not None:
            save_processor(processor, aside)
        if card is not None:
            (aside / CARD).write_text(card, encoding="utf-8")
    return folder
