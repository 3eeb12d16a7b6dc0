"""Writes trained adapters as standard PEFT folders and reads them back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replaced_folder
from fedllm.models.image_format import ImageProcessor
from fedllm.models.lora import PREFIX, head_modules, lora_layers, row_lengths, shortest_suffixes
from fedllm.models.structure import FUSED, SplitQKV

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LABELS = "labels.json"
QUANTIZATION = "quantization.json"
BASE_CONFIG = "base_config.json"
CARD = "README.md"
Processor = PreTrainedTokenizerBase | ImageProcessor
"""What turns texts or images into a model's inputs."""

_OF_LOADING = ("dtype", "quantization_config")  # keys of a config that say how the base was loaded here


def save_adapter(
    model: PeftModel,
    folder: str | Path,
    base_name: str,
    processor: Processor | None = None,
    card: str | None = None,
) -> Path:
    """Writes LoRA and head as a PEFT folder and returns its path.

    base_config.json is the base's config with the number and names of the outputs and the pad token, which an adapter's
    own config has no place for. (A folder with a config.json would be a whole model to transformers.) If the config
    names the outputs, labels.json holds the names (index -> name). A causal language model has neither file. If a
    processor is given, the folder holds it too.
    card: the text of README.md; None for a folder without one.
    Plain transformers or PEFT read the folder and give the same outputs. For a sequence classifier:

        config = AutoConfig.from_pretrained(f"{folder}/base_config.json")
        AutoModelForSequenceClassification.from_pretrained(folder, config=config)
        AutoPeftModelForSequenceClassification.from_pretrained(folder, id2label=config.id2label)

    For a quantised base, quantization.json holds the arguments of the `BitsAndBytesConfig` that loads the same base.
    The folder is written under a temporary name and then renamed, so that a reader never finds a part of it. An
    existing adapter is replaced.

    Raises UserError if `folder` exists and is not an adapter, OSError or RunError if it cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).exists()):
        raise UserError(f"{folder}: is no adapter ({CONFIG} is not in it), so it is not replaced; name another folder")
    with replaced_folder(folder) as aside:
        _write(model, aside, base_name, processor, card)
    return folder


def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Copies a saved adapter into `model`, in place and bit for bit.

    Raises UserError, and leaves `model` unchanged, in these cases: the folder holds no safetensors adapter; its rank,
    alpha or kind differs; names, shapes or dtypes differ from those of `model`; a number is not finite.
    """
    folder = Path(folder).expanduser()
    _check_config(folder / CONFIG, adapter_config(model, ""))
    path = folder / WEIGHTS
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as cause:
        raise UserError(f"{path}: is not a readable safetensors file: {cause}") from cause
    _check_tensors(path, stored, adapter_tensors(model))
    set_peft_model_state_dict(model, _split(model, stored, path))


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The trainable tensors with the names and shapes of a standard PEFT file, on the CPU.

    LoRA on the parts of a SplitQKV becomes LoRA on the fused [h, 3h] projection, with one rank-r part per role:
    A = [A_query; A_value] [2r, h] and B [3h, 2r] with B_query in rows 0:h, columns 0:r and B_value in rows 2h:3h,
    columns r:2r. So B A = [B_query A_query; 0; B_value A_value]. Under DoRA the rows of a role without LoRA have the
    lengths of the base's rows, which changes nothing there.
    """
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    for path, roles in _split_roles(model).items():
        parts_a, parts_b = ([tensors.pop(_key(f"{path}.{role}", side)) for role in roles] for side in "AB")
        fused_b = torch.zeros(3 * parts_b[0].shape[0], sum(b.shape[1] for b in parts_b))
        for block, part in zip(_blocks(fused_b, roles), parts_b, strict=True):
            block.copy_(part)
        tensors |= {_key(path, "A"): torch.cat(parts_a), _key(path, "B"): fused_b}
        if uses_dora(model):
            own = {role: tensors.pop(_lengths_key(f"{path}.{role}")) for role in roles}
            tensors[_lengths_key(path)] = torch.cat([own.get(role, _base_lengths(model, path, role)) for role in FUSED])
    return tensors


def uses_dora(model: PeftModel) -> bool:
    """Whether the model's adapters are DoRA's."""
    return bool(cast(LoraConfig, model.peft_config["default"]).use_dora)


def adapter_config(model: PeftModel, base_name: str) -> LoraConfig:
    """The adapter_config.json of `adapter_tensors(model)`.

    A fused projection has rank and alpha multiplied by the number n of its adapted roles, or alpha by sqrt(n) with
    rslora, so that its scale is that of its roles.
    """
    ours = cast(LoraConfig, model.peft_config["default"])
    split = _split_roles(model)
    apart = {f"{path}.{role}" for path, roles in split.items() for role in roles}
    whole = {path: layer for path, layer in lora_layers(model).items() if path not in apart}
    names = [name.removeprefix(PREFIX) for name, _ in model.named_modules()]
    parts = len(next(iter(split.values()), ("",)))
    fused = shortest_suffixes(split, names)
    fused_alpha = (math.sqrt(parts) if ours.use_rslora else parts) * ours.lora_alpha
    config = LoraConfig(
        task_type=ours.task_type,
        base_model_name_or_path=base_name,
        inference_mode=True,
        r=ours.r if whole else parts * ours.r,
        lora_alpha=ours.lora_alpha if whole else fused_alpha,  # type: ignore[arg-type]
        rank_pattern=dict.fromkeys(fused, parts * ours.r) if whole else {},
        alpha_pattern=dict.fromkeys(fused, fused_alpha) if whole else {},
        lora_dropout=ours.lora_dropout,
        use_rslora=ours.use_rslora,
        use_dora=ours.use_dora,
        fan_in_fan_out=bool(split) or any(isinstance(layer.get_base_layer(), Conv1D) for layer in whole.values()),
        modules_to_save=head_modules(model),
    )
    config.target_modules = shortest_suffixes([*whole, *split], names)  # the constructor would make it an unordered set
    return config


def _split_roles(model: PeftModel) -> dict[str, list[str]]:
    """Path of every SplitQKV -> its adapted roles, in the order query, key, value."""
    adapted = lora_layers(model)
    split = [name.removeprefix(PREFIX) for name, module in model.named_modules() if isinstance(module, SplitQKV)]
    roles = {path: [role for role in FUSED if f"{path}.{role}" in adapted] for path in split}
    return {path: found for path, found in roles.items() if found}


def _key(path: str, side: str) -> str:
    return f"{PREFIX}{path}.lora_{side}.weight"


def _lengths_key(path: str) -> str:
    return f"{PREFIX}{path}.lora_magnitude_vector"


def _base_lengths(model: PeftModel, path: str, role: str) -> Tensor:
    return row_lengths(model.get_submodule(f"{PREFIX}{path}.{role}")).cpu()


def _blocks(fused_b: Tensor, roles: list[str]) -> list[Tensor]:
    """Views [h, r] into the fused B [3h, n r], one per role: the rows and the columns that belong to the role."""
    rows, rank = fused_b.shape[0] // len(FUSED), fused_b.shape[1] // len(roles)
    starts = [FUSED.index(role) * rows for role in roles]
    return [fused_b[row : row + rows, i * rank : (i + 1) * rank] for i, row in enumerate(starts)]


def _split(model: PeftModel, stored: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The inverse of the fusion in `adapter_tensors`. UserError if a fused B has numbers outside its blocks."""
    tensors = dict(stored)
    for layer, roles in _split_roles(model).items():
        fused_b = tensors.pop(_key(layer, "B"))
        blocks = _blocks(fused_b, roles)
        if fused_b.count_nonzero() != sum(block.count_nonzero() for block in blocks):
            raise UserError(f"{path}: {_key(layer, 'B')} is not made of separate blocks for {' and '.join(roles)}")
        for role, a, b in zip(roles, tensors.pop(_key(layer, "A")).chunk(len(roles)), blocks, strict=True):
            tensors |= {_key(f"{layer}.{role}", "A"): a, _key(f"{layer}.{role}", "B"): b}
        if uses_dora(model):
            lengths = dict(zip(FUSED, tensors.pop(_lengths_key(layer)).chunk(len(FUSED)), strict=True))
            tensors |= {_lengths_key(f"{layer}.{role}"): lengths[role] for role in roles}
            for role in set(FUSED) - {*roles}:
                if not torch.allclose(lengths[role], _base_lengths(model, layer, role), rtol=1e-4):
                    raise UserError(f"{path}: {_lengths_key(layer)} changes the {role}, which has no adapter here")
    return tensors


def _write(model: PeftModel, folder: Path, base_name: str, processor: Processor | None, card: str | None) -> None:
    try:
        save_file(adapter_tensors(model), folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"{folder / WEIGHTS} could not be written: {error}; make room") from error
    adapter_config(model, base_name).save_pretrained(str(folder))
    if model.peft_config["default"].task_type != TaskType.CAUSAL_LM:
        _write_head_config(model, folder)
    if getattr(model.get_base_model(), "is_quantized", False):
        text = json.dumps(model.config.quantization_config.to_dict(), indent=2, sort_keys=True) + "\n"
        (folder / QUANTIZATION).write_text(text, encoding="utf-8")
    if processor is not None:
        save_processor(processor, folder)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")


def _write_head_config(model: PeftModel, folder: Path) -> None:
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _OF_LOADING}
    (folder / BASE_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    labels = dict(model.config.id2label)
    if labels != {i: f"LABEL_{i}" for i in labels}:
        (folder / LABELS).write_text(json.dumps(labels, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_processor(processor: Processor, folder: Path) -> None:
    """Raises RunError if it cannot be written, for which the tokenizers library raises a bare Exception."""
    try:
        processor.save_pretrained(str(folder))
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise RunError(f"{folder}: the tokenizer could not be written: {error}; make room") from error


def _check_config(path: Path, ours: LoraConfig) -> None:
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            raise ValueError(f"found {type(theirs).__name__}, expected keys and values")
    except (OSError, ValueError) as cause:
        raise UserError(f"{path}: is not a readable adapter config: {cause}") from cause
    defaults = LoraConfig()
    for key in ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        found, value = theirs.get(key, getattr(defaults, key)), getattr(ours, key)
        if found != value:
            raise UserError(f"{path}: {key} is {found!r}, expected {getattr(value, 'value', value)!r} as in this model")


def _check_tensors(path: Path, stored: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing, unknown = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if missing or unknown:
        raise UserError(
            f"{path}: is not an adapter of this model: {len(missing)} tensors missing {sorted(missing)[:2]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:2]}"
        )
    for name, tensor in stored.items():
        found, wanted = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (tensor, expected[name]))
        if found != wanted:
            raise UserError(f"{path}: {name} is {found}, expected {wanted}")
        if not tensor.isfinite().all():
            raise UserError(f"{path}: {name} has numbers that are not finite")
