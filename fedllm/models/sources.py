"""Finds a model's weights: in a folder, a package, a local hub, the Hugging Face cache or the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fedllm.common import hub
from fedllm.common.errors import UserError
from fedllm.models.settings import BUILT_NAMES, ModelSettings

_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def check_quantize(model: ModelSettings) -> None:
    """Raises UserError for a quantisation that is not possible here."""
    if model.quantize == "none":
        return
    if not model.pretrained:
        raise UserError(f"model.quantize: {model.quantize} needs a pretrained model, but model.pretrained is false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize: {model.quantize} needs bitsandbytes; run: pip install fedllm[quant]")


def check_available(name: str, local_hub: str | None = None) -> None:
    """Raises UserError with the reason unless the model's weights are on this machine or the hub has the model."""
    if name in BUILT_NAMES:
        return
    if (place := hub.find_local("models", name, local_hub)) is not None:
        find_model(place, ModelSettings(name=name))
    elif cached_folder(name) is None:
        ask_hub(name, local_hub)


def cached_folder(name: str) -> str | None:
    """The folder of a model in the Hugging Face cache, or None."""
    with contextlib.suppress(HFValidationError):  # the name is not a valid hub name
        if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
            return str(Path(config).parent)
    return None


def ask_hub(name: str, local_hub: str | None) -> None:
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as cause:  # invalid name, no such model, no access, no network: the libraries raise many types
        raise hub.not_found("models", name, local_hub, cause) from cause


def find_model(place: Path, model: ModelSettings) -> Path:
    """The model folder or GGUF file in `place` or below it. Raises UserError unless there is exactly one."""
    if _is_model(place):
        found = [place]
    else:
        folders = (path.parent for path in place.rglob("config.json") if _is_model(path.parent))
        found = sorted([*folders, *place.rglob("*.gguf")])
    if not found:
        raise UserError(f"model '{model.name}': no model (config.json with a model_type, or .gguf file) in {place}")
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(place)) for path in found)
        raise UserError(f"model '{model.name}': {place} holds {len(found)} models, name one of them: {names}")
    if model.pretrained and found[0].is_dir() and not any((found[0] / weights).exists() for weights in _WEIGHTS):
        raise UserError(
            f"model '{model.name}': {found[0]} has a config but no weights ({' or '.join(_WEIGHTS[::2])}). "
            "Add them, or set model.pretrained=false for a random start."
        )
    return found[0]


def _is_model(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".gguf"
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
