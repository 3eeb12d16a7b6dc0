"""Loads backbones by name: a frozen transformers model in eval mode, with a task's head and a tokenizer."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
)

from fedllm.common import hub
from fedllm.common.errors import UserError
from fedllm.common.quiet import quiet
from fedllm.common.seeding import derive
from fedllm.models.backbone import Backbone as Backbone
from fedllm.models.causal_models import is_causal, require_causal, template_notes
from fedllm.models.gguf_copy import copy_of, require_copy
from fedllm.models.head_start import Loaded, choose_start
from fedllm.models.image_format import image_format
from fedllm.models.image_models import BUILT, built_config, start_vit
from fedllm.models.preparation import fuse_activation, max_length, set_dropout, set_padding
from fedllm.models.quantization import keep_as_stored, quantization_config
from fedllm.models.settings import ModelSettings
from fedllm.models.sources import ask_hub, cached_folder, check_quantize, find_model
from fedllm.models.structure import find_head
from fedllm.tasks.heads import Head

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_backbone(model: ModelSettings, head: Head, *, local_hub: str | None = None, seed: int = 0) -> Backbone:
    """Loads the model called `model.name` (see `fedllm.common.hub`), with the head of a task.

    If `model.pretrained` is false, all weights are random. Otherwise only those that the checkpoint lacks are. Random
    weights are drawn from (seed, 'model-init'); the global random state does not change. `head_start.choose_start` says
    whether a head that the checkpoint has is kept. Dropout of attention probabilities is off; the other dropout rates
    are the model's own, or `model.dropout`.

    Padding is on the right. A name of `image_models.BUILT` is a model of images with random weights.

    Raises UserError: the name is found nowhere, weights are missing or incomplete, transformers has no such head for
    this model, the dropout is not usable, the quantisation is not possible, there is no head that can be kept, or the
    checkpoint is no causal language model where the head is that of one.
    """
    if model.dropout is not None and not 0 <= model.dropout < 1:
        raise UserError(f"model.dropout: found {model.dropout}, expected null or a rate in [0, 1)")
    if model.name in BUILT:
        return _build(model, head, seed)
    load = partial(_load, model, head, seed)
    place = hub.find_local("models", model.name, local_hub)
    source = "hub" if place is None else find_model(place, model)
    check_quantize(model)
    try:
        with quiet():
            if isinstance(source, str):
                return _from_hub(model.name, local_hub, load)
            return _from_gguf(source, model, load) if source.suffix == ".gguf" else _from_folder(source, load)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, struct.error) as cause:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise UserError(f"model '{model.name}' (from {source}) cannot be loaded: {reason}") from cause


def _from_folder(source: Path, load: Callable[..., Backbone]) -> Backbone:
    return load(source, str(source), local_files_only=True)


def _from_gguf(source: Path, model: ModelSettings, load: Callable[..., Backbone]) -> Backbone:
    """Loads from the file's copy as safetensors, or from the file itself where there is none."""
    copy = copy_of(source) if model.quantize == "none" else require_copy(source, model.quantize)
    if copy.folder is None:
        backbone = load(source, str(source.parent), gguf_file=source.name, local_files_only=True)
    else:
        backbone = load(source, str(copy.folder), local_files_only=True)
        backbone.model.name_or_path = backbone.model.config.name_or_path = str(source.parent)
    return replace(backbone, notes=(*((copy.note,) if copy.note else ()), *backbone.notes))


def _from_hub(name: str, local_hub: str | None, load: Callable[..., Backbone]) -> Backbone:
    """Loads from the Hugging Face cache, or else from the hub.

    Without a network, from_pretrained repeats its requests for minutes. To avoid this, the cache is read as a folder,
    and one request first asks the hub whether the name exists.
    """
    if (cached := cached_folder(name)) is not None:
        with contextlib.suppress(OSError):  # the cache holds only some of the files
            return load("hub", cached, local_files_only=True)
    ask_hub(name, local_hub)
    return load("hub", name)


def _load(
    model: ModelSettings, head: Head, seed: int, source: Path | Literal["hub"], where: str, **options: Any
) -> Backbone:
    """Loads the backbone from `where`. `options` go to every from_pretrained. A model's own code is never run."""
    options["trust_remote_code"] = False
    local = options.get("local_files_only", False)
    config = AutoConfig.from_pretrained(where, **head.config, **options)
    if is_causal(head):
        require_causal(model, config)
    else:
        _check_kind(model.name, config, head)
    set_dropout(config, model.dropout)
    fuse_activation(config)
    tokenizer = None if _reads_images(head) else AutoTokenizer.from_pretrained(where, **options)
    with _draws_from(seed):
        if model.pretrained:
            net, loaded = _pretrained(model, head, config, where, options)
        else:
            net, loaded = _random(model, head, config), Loaded()
    paths = find_head(net)
    if loaded.absent:
        paths = _trained_anew(model.name, net, paths, loaded.absent)
    start = choose_start(
        model, net, paths, loaded, head, lambda: AutoConfig.from_pretrained(where, **options).id2label or {}
    )
    images = None
    if tokenizer is None:
        images = image_format(net, Path(where) if local else None)
    else:
        set_padding(model.name, net, tokenizer)
        net.config.use_cache = False
    net.requires_grad_(False).train(False)
    base = _base_name(model.name, source)
    length, notes = None, tuple[str, ...]()
    if tokenizer is not None:
        length = max_length(net)
        notes = template_notes(model.name, tokenizer) if is_causal(head) else ()
    task = head.task_type
    return Backbone(net, tokenizer, model.name, source, paths, task, length, base, start, notes, images)


def _build(model: ModelSettings, head: Head, seed: int) -> Backbone:
    """The model of images that is built by its name."""
    if not _reads_images(head):
        raise UserError(
            f"model.name={model.name}: a model of images, found a task of texts; set data.task=image_classification, "
            f"or name a model of texts"
        )
    if model.quantize != "none":
        raise UserError(f"model.quantize: {model.quantize} needs a pretrained model, but {model.name} begins at random")
    model = replace(model, pretrained=False)
    config = built_config(model.name, head)
    set_dropout(config, model.dropout)
    with quiet(), _draws_from(seed):
        net = _random(model, head, config)
        if isinstance(config, ViTConfig):
            start_vit(net)
    start = choose_start(model, net, find_head(net), Loaded(), head, dict)
    net.requires_grad_(False).train(False)
    images = image_format(net, None)
    return Backbone(net, None, model.name, "built", find_head(net), head.task_type, None, model.name, start, (), images)


def _reads_images(head: Head) -> bool:
    return head.image_size is not None


def _check_kind(name: str, config: PreTrainedConfig, head: Head) -> None:
    """Raises UserError for a model of texts with a head for images, and the other way round."""
    if type(config) in _auto_class(head)._model_mapping:
        return
    kinds = {True: "image_classification", False: "classification"}
    for images, mapping in (
        (True, transformers.AutoModelForImageClassification),
        (False, transformers.AutoModelForSequenceClassification),
    ):
        if images != _reads_images(head) and type(config) in mapping._model_mapping:
            found, expected = ("images", "texts") if images else ("texts", "images")
            raise UserError(
                f"model.name={name}: a model of {found} ({config.model_type}), but the data are {expected}; name "
                f"another model, or set data.task={kinds[images]} with such data"
            )


def _base_name(name: str, source: Path | Literal["hub"]) -> str:
    """A hub id, also of a model in the local hub, or else an absolute path, for adapter_config.json.

    The path leads to the model's folder. To load a GGUF file from it, transformers also needs `gguf_file`.
    """
    if source == "hub" or hub.is_hub_name(name):
        return name
    return str((source.parent if source.is_file() else source).resolve())


def _pretrained(
    model: ModelSettings, head: Head, config: PreTrainedConfig, where: str, options: dict[str, Any]
) -> tuple[PreTrainedModel, Loaded]:
    """The checkpoint's model, and the names of the parameters that the checkpoint lacks or has in another shape."""
    if model.quantize != "none":
        with torch.device("meta"):
            skeleton = _from_config(head, config)
        options = {**options, "quantization_config": quantization_config(model, skeleton, _DTYPES[model.dtype])}
    elif "gguf_file" in options and hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options = {**options, "quantization_config": transformers.GgufConfig(dequantize=True)}
    options = {"dtype": _DTYPES[model.dtype], "ignore_mismatched_sizes": True, "output_loading_info": True, **options}
    net, info = _auto_class(head).from_pretrained(where, config=config, **options)
    keep_as_stored(net)
    return net, Loaded(frozenset(info["missing_keys"]), frozenset(key for key, *_ in info["mismatched_keys"]))


def _random(model: ModelSettings, head: Head, config: PreTrainedConfig) -> PreTrainedModel:
    """The model with random weights, drawn in float32 so that every dtype starts from the same values."""
    net: nn.Module = _from_config(head, config)
    return cast(PreTrainedModel, net.to(_DTYPES[model.dtype]))


def _from_config(head: Head, config: PreTrainedConfig) -> PreTrainedModel:
    return cast(PreTrainedModel, _auto_class(head).from_config(config, dtype=torch.float32))


def _auto_class(head: Head) -> Any:
    """The transformers class that loads a base model with this head."""
    return getattr(transformers, head.auto_class)


def _trained_anew(name: str, net: PreTrainedModel, head: tuple[str, ...], absent: list[str]) -> tuple[str, ...]:
    """The modules to train: the head and, if the checkpoint lacks it, the pooler.

    A pooler with random frozen weights would lower the accuracy.
    """
    pooler = f"{net.base_model_prefix}.pooler"
    if any(key.startswith(f"{pooler}.") for key in absent):
        head = (pooler, *head)
    if lost := [key for key in absent if not key.startswith(tuple(f"{path}." for path in head))]:
        raise UserError(
            f"model '{name}': {len(lost)} of the frozen parameters are not in the checkpoint, or not in this shape: "
            f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}. Name a checkpoint that has them."
        )
    return head


@contextlib.contextmanager
def _draws_from(seed: int) -> Iterator[None]:
    """Seeds torch's global CPU generator from (seed, 'model-init') inside the context, and restores its state after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "model-init"))
        yield
