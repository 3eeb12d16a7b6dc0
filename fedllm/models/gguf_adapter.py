"""Writes LoRA adapters of causal language models as GGUF files, in the layout of llama.cpp's convert_lora_to_gguf.py.

For a weight called W in the base's GGUF file, the file has W.lora_a [r, in] and W.lora_b [out, r]; llama.cpp adds
(alpha / r) lora_b lora_a to W, with one alpha for all. The rows of a Llama's query and key are permuted in GGUF files.
"""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fedllm.common.errors import RunError, UserError
from fedllm.models.adapter_files import adapter_config, adapter_tensors, uses_dora
from fedllm.models.lora import PREFIX

SUFFIX = ".gguf"
# model_type of transformers -> architecture of GGUF files.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2",
}  # fmt: skip


def require_gguf(out: Path) -> None:
    """Raises UserError unless a GGUF file can be written to `out`."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--gguf needs the package gguf; run: pip install fedllm[gguf]")
    if out.suffix != SUFFIX:
        raise UserError(f"--out={out}: with --gguf expected the name of a file that ends in {SUFFIX}")
    if out.is_dir():
        raise UserError(f"--out={out}: is a folder; with --gguf expected the name of a file")


def save_gguf_adapter(model: PeftModel | PreTrainedModel, out: str | Path, name: str) -> Path:
    """Writes the adapter in float32 and returns its path; a file there is replaced. name: general.name in the file.

    Raises UserError for a model that has no causal language model's adapter, or an architecture that is not in
    ARCHITECTURES, and RunError if it cannot be written.
    """
    out = Path(out).expanduser()
    require_gguf(out)
    architecture = _architecture(model)
    assert isinstance(model, PeftModel)
    tensors = _gguf_tensors(model, architecture)
    aside = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(aside, architecture, name, _file_alpha(adapter_config(model, "")), tensors)
        aside.replace(out)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}; make room") from error
    finally:
        aside.unlink(missing_ok=True)
    return out


def _architecture(model: PeftModel | PreTrainedModel) -> str:
    config = model.config
    if not isinstance(model, PeftModel):
        raise UserError("--gguf: the run trained all weights, so there is no adapter; export the model without --gguf")
    task: Any = model.peft_config["default"].task_type
    if task != "CAUSAL_LM":
        raise UserError("--gguf: the run trained no causal language model, and llama.cpp has no adapters for others")
    if uses_dora(model):
        raise UserError("--gguf: the adapter is DoRA's, which llama.cpp cannot apply; export with --merge instead")
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"--gguf: the base is of type {config.model_type}, expected one of {known}")
    return ARCHITECTURES[config.model_type]


def _gguf_tensors(model: PeftModel, architecture: str) -> dict[str, Tensor]:
    """The tensors by their names in the file, float32."""
    import gguf

    base = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, base.num_hidden_layers)
    stored = adapter_tensors(model)
    paths = [key.removesuffix(".lora_A.weight") for key in stored if key.endswith(".lora_A.weight")]
    config = adapter_config(model, "")
    found: dict[str, Tensor] = {}
    for path in paths:
        a, b = stored[f"{path}.lora_A.weight"].float(), stored[f"{path}.lora_B.weight"].float()
        layer = path.removeprefix(PREFIX)
        if (weight := names.get_name(f"{layer}.weight", try_suffixes=(".weight",))) is None:
            raise UserError(f"--gguf: {layer} has no name in GGUF files of {architecture}; export the adapter without")
        b = b * (_alpha(config, layer) / _file_alpha(config))
        if architecture == "llama" and (heads := _heads(model, layer)):
            b = _permuted(b, heads)
        found |= {f"{weight}.lora_a": a.contiguous(), f"{weight}.lora_b": b.contiguous()}
    return found


def _file_alpha(config: LoraConfig) -> float:
    """The alpha of the file: that of the layers without one of their own."""
    return _as_standard(config, config.lora_alpha, config.r)


def _alpha(config: LoraConfig, layer: str) -> float:
    """The alpha of a layer; a fused projection may have one of its own."""
    alphas, ranks = config.alpha_pattern or {}, config.rank_pattern or {}
    own = (ending for ending in alphas if f".{layer}".endswith(f".{ending}"))
    if (ending := next(own, None)) is None:
        return _file_alpha(config)
    return _as_standard(config, alphas[ending], ranks[ending])


def _as_standard(config: LoraConfig, alpha: float, rank: int) -> float:
    """The alpha with which llama.cpp's alpha / rank is the adapter's scale: rslora counts alpha / sqrt(rank)."""
    return float(alpha) * math.sqrt(rank) if config.use_rslora else float(alpha)


def _heads(model: PeftModel, layer: str) -> int:
    """The heads of a query or key projection; 0 for another layer."""
    last, config = layer.rpartition(".")[2], model.config
    return int({"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(last, 0))


def _permuted(b: Tensor, heads: int) -> Tensor:
    """The rows [heads * d, r] as GGUF files of Llama have them: of each head, the pairs that are rotated together
    stand side by side, and not half a head apart."""
    rank = b.shape[1]
    return b.reshape(heads, 2, -1, rank).transpose(1, 2).reshape(b.shape)


def _write(path: Path, architecture: str, name: str, alpha: float, tensors: dict[str, Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(name)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        for key, value in tensors.items():
            writer.add_tensor(key, value.to(torch.float32).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
