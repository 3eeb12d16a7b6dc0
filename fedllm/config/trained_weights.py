"""Which settings go together with adapters, and which with training all weights (`lora: null`)."""

from __future__ import annotations

from fedllm.config.settings import RunSettings
from fedllm.models.settings import LoraSettings, ModelSettings


def misfit_of_weights(lora: LoraSettings | None, model: ModelSettings, run: RunSettings) -> str | None:
    """What does not fit, as the text of an error; None if all fits. lora: None where all weights are trained."""
    if lora is not None:
        if lora.dora and model.quantize != "none":
            return (
                f"lora.dora: found true with model.quantize={model.quantize}, expected none: DoRA reads the base's "
                "weights, which are packed then; set model.quantize=none, or leave dora out"
            )
        if model.norm == "average":
            return None
        return (
            f"model.norm: found {model.norm}, but the batch norm of a model with adapters is frozen; set lora: "
            f"null, or leave model.norm out"
        )
    if model.quantize != "none":
        return (
            f"model.quantize: found {model.quantize}, but lora: null trains all weights, which are float32; set "
            f"model.quantize=none, or train adapters"
        )
    if model.dtype != "float32":
        return (
            f"model.dtype: found {model.dtype}, but lora: null trains all weights, which are float32; set "
            f"model.dtype=float32, and run.precision=bfloat16 for products in bfloat16"
        )
    if run.gradient_checkpointing:
        return (
            "run.gradient_checkpointing: found true, which works with adapters only; with lora: null leave it out, and "
            "lower local.batch_size where memory is short"
        )
    if run.slices != "auto":
        return f"run.slices: found {run.slices}, which cuts rows of models with adapters; with lora: null leave it out"
    return None
