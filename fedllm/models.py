"""Backbones: a transformers ...ForSequenceClassification and its tokenizer, found by name, frozen, in eval mode."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fedllm import hub
from fedllm.errors import UserError
from fedllm.parts import attentions, find_head
from fedllm.quiet import quiet
from fedllm.random import derive
from fedllm.recipe import Model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True)
class Backbone:
    """A frozen sequence classifier and its tokenizer.

    name: as the user wrote it. source: the folder or GGUF file it was read from, or "hub" (Hugging Face cache or hub).
    head: paths of the task head's modules, all of them trained. max_length: tokens the model has positions for, or None
    if it has no such limit.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: Path | Literal["hub"]
    head: tuple[str, ...]
    max_length: int | None

    @property
    def base_name(self) -> str:
        """What adapter_config.json names as the base: the name, or the folder for a model that a package carries."""
        return self.name if self.source == "hub" or not self.name.startswith("package:") else str(self.source)


@dataclass(frozen=True)
class _Task:
    num_labels: int
    regression: bool
    label_names: Sequence[str] | None

    def __post_init__(self) -> None:
        if self.num_labels < 1:
            raise UserError(f"the task has {self.num_labels} labels, expected at least 1")
        if self.regression and self.num_labels != 1:
            raise UserError(f"a regression task has 1 output, found num_labels={self.num_labels}")
        if self.label_names is not None and len(self.label_names) != self.num_labels:
            raise UserError(f"found label names {list(self.label_names)}, expected {self.num_labels} of them")

    def config(self) -> dict[str, Any]:
        """The task as transformers' config keys; a checkpoint's own labels, those of another task, are replaced."""
        names = self.label_names or [f"LABEL_{i}" for i in range(self.num_labels)]
        return {
            "num_labels": self.num_labels,
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": "regression" if self.regression else "single_label_classification",
        }


def load_backbone(
    model: Model,
    *,
    num_labels: int,
    regression: bool,
    label_names: Sequence[str] | None = None,
    local_hub: str | None = None,
    seed: int = 0,
) -> Backbone:
    """The model that `model.name` leads to (see `fedllm.hub`), with a head of `num_labels` outputs.

    Weights are random only where `model.pretrained` is false (all of them) or the checkpoint has none (the head); they
    are drawn from (seed, 'model-init'), and the global random state is left as it was. Attention-probability dropout
    is off; the other dropout rates are the model's own, or `model.dropout`.

    The classifiers of GPT-2, Llama and their like read the last token that is not the pad token and do not look at the
    attention mask. Where pad is eos, an eos that ends a text is therefore never the token read: padding cannot change
    the logits, but such an eos adds nothing. Padding is on the right.

    Raises UserError: name found nowhere, weights missing or incomplete, no such classifier in transformers, unusable
    task or dropout, quantisation that cannot be done.
    """
    task = _Task(num_labels, regression, label_names)
    if model.dropout is not None and not 0 <= model.dropout < 1:
        raise UserError(f"model.dropout: found {model.dropout}, expected null or a rate in [0, 1)")
    load = partial(_load, model, task, seed)
    place = hub.find_local("models", model.name, local_hub)
    source = "hub" if place is None else _model_in(place, model)
    _check_quantize(model, source)
    try:
        with quiet():
            return _from_hub(model.name, local_hub, load) if isinstance(source, str) else _from_disk(source, load)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as cause:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise UserError(f"model '{model.name}' (from {source}) cannot be loaded: {reason}") from cause


def _check_quantize(model: Model, source: Path | str) -> None:
    if model.quantize == "none":
        return
    if not model.pretrained:
        raise UserError(f"model.quantize: {model.quantize} needs a pretrained model, but model.pretrained is false")
    if str(source).endswith(".gguf"):
        raise UserError(f"model.quantize: {model.quantize} cannot be had of {source}: a GGUF file is read dequantised")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize: {model.quantize} needs bitsandbytes; run: pip install fedllm[quant]")


def _from_disk(source: Path, load: Callable[..., Backbone]) -> Backbone:
    if source.suffix == ".gguf":
        return load(source, str(source.parent), gguf_file=source.name, local_files_only=True)
    return load(source, str(source), local_files_only=True)


def _from_hub(name: str, local_hub: str | None, load: Callable[..., Backbone]) -> Backbone:
    """The Hugging Face cache, then the hub.

    Without a network from_pretrained would go on trying for minutes. So the cache is read as a folder, and the hub is
    first asked once, for the name alone.
    """
    if (cached := _cached(name)) is not None:
        with contextlib.suppress(OSError):  # only a part of it is there
            return load("hub", cached, local_files_only=True)
    _ask_hub(name, local_hub)
    return load("hub", name)


def check_available(name: str, local_hub: str | None = None) -> None:
    """Raises UserError, saying why, unless a model is on this machine with its weights, or the hub answers for it."""
    if (place := hub.find_local("models", name, local_hub)) is not None:
        _model_in(place, Model(name=name))
    elif _cached(name) is None:
        _ask_hub(name, local_hub)


def _cached(name: str) -> str | None:
    """The folder of a model in the Hugging Face cache."""
    with contextlib.suppress(HFValidationError):  # a name that can be on no hub
        if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
            return str(Path(config).parent)
    return None


def _ask_hub(name: str, local_hub: str | None) -> None:
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as cause:  # a name that is none, no such model, no access, no network: each library's own kind
        raise hub.not_found("models", name, local_hub, cause) from cause


def _model_in(place: Path, model: Model) -> Path:
    """The model folder or GGUF file in `place` or below it. UserError unless there is exactly one."""
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


def _load(model: Model, task: _Task, seed: int, source: Path | Literal["hub"], where: str, **options: Any) -> Backbone:
    """The backbone from `where`; `options` go to every from_pretrained. Code that comes with a model is never run."""
    options["trust_remote_code"] = False
    config = AutoConfig.from_pretrained(where, **task.config(), **options)
    _set_dropout(config, model.dropout)
    _fuse_activation(config)
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    with _draws_from(seed):
        net, absent = _pretrained(model, config, where, options) if model.pretrained else (_random(model, config), [])
    head = find_head(net)
    if absent:
        head = _trained_anew(model.name, net, head, absent)
    _set_padding(model.name, net, tokenizer)
    net.config.use_cache = False
    net.requires_grad_(False).train(False)
    return Backbone(net, tokenizer, model.name, source, head, _max_length(net))


def _pretrained(
    model: Model, config: PreTrainedConfig, where: str, options: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    """The checkpoint's model, and the names of the parameters that the checkpoint does not have in the right shape."""
    if model.quantize != "none":
        options = {**options, "quantization_config": _quantization(model, config)}
    elif "gguf_file" in options and hasattr(transformers, "GgufConfig"):  # before it had one, it always dequantised
        options = {**options, "quantization_config": transformers.GgufConfig(dequantize=True)}
    options = {"dtype": _DTYPES[model.dtype], "ignore_mismatched_sizes": True, "output_loading_info": True, **options}
    net, info = AutoModelForSequenceClassification.from_pretrained(where, config=config, **options)
    return net, sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})


def _random(model: Model, config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights, drawn in float32 so that every dtype starts from the same values."""
    net: nn.Module = _from_config(config)
    return cast(PreTrainedModel, net.to(_DTYPES[model.dtype]))


def _from_config(config: PreTrainedConfig) -> PreTrainedModel:
    build: Any = AutoModelForSequenceClassification.from_config
    return cast(PreTrainedModel, build(config, dtype=torch.float32))


def _trained_anew(name: str, net: PreTrainedModel, head: tuple[str, ...], absent: list[str]) -> tuple[str, ...]:
    """The head, and with it a pooler that the checkpoint lacks: random and frozen, it would only harm."""
    pooler = f"{net.base_model_prefix}.pooler"
    if any(key.startswith(f"{pooler}.") for key in absent):
        head = (pooler, *head)
    if lost := [key for key in absent if not key.startswith(tuple(f"{path}." for path in head))]:
        raise UserError(
            f"model '{name}': {len(lost)} of the frozen parameters are not in the checkpoint, or not in this shape: "
            f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}. Name a checkpoint that has them."
        )
    return head


def _quantization(model: Model, config: PreTrainedConfig) -> BitsAndBytesConfig:
    """4 bit (NF4, its scales in 8 bit) or 8 bit, for all but the head and a fused query/key/value projection.

    LoRA takes such a projection apart.
    """
    with torch.device("meta"):
        skeleton = _from_config(config)
    fused = [attention.query for attention in attentions(skeleton, model.name) if attention.fused]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=model.quantize == "4bit",
        load_in_8bit=model.quantize == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_DTYPES[model.dtype],
        llm_int8_threshold=0.0,  # the columns above it are those of the whole batch: one client's would touch another's
        llm_int8_skip_modules=[*find_head(skeleton), *fused],
    )


def _set_dropout(config: PreTrainedConfig, rate: float | None) -> None:
    """Attention-probability dropout off; every other rate of the config (or null, which copies one) becomes `rate`."""
    for key, value in list(vars(config).items()):
        is_rate = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if is_rate and ("dropout" in key or "pdrop" in key):
            if "att" in key:
                setattr(config, key, 0.0)
            elif rate is not None:
                setattr(config, key, rate)


def _fuse_activation(config: PreTrainedConfig) -> None:
    """GPT-2's activation as one operation; transformers' "gelu_new" takes eight and keeps what lies between them."""
    for key, value in list(vars(config).items()):
        if value == "gelu_new":
            setattr(config, key, "gelu_pytorch_tanh")


def _set_padding(name: str, net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"model '{name}': its tokenizer has neither a pad nor an eos token to pad texts with")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    net.config.pad_token_id = tokenizer.pad_token_id
    rows = net.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"model '{name}': its tokenizer has {len(tokenizer)} tokens, but the model only {rows}")


def _max_length(net: PreTrainedModel) -> int | None:
    """Positions a text can use: RoBERTa and its kin number them from padding_idx + 1."""
    positions: int | None = getattr(net.config, "max_position_embeddings", None)
    tables = (m for n, m in net.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding))
    if positions is None or (table := next(tables, None)) is None or table.padding_idx is None:
        return positions
    return positions - table.padding_idx - 1


@contextlib.contextmanager
def _draws_from(seed: int) -> Iterator[None]:
    """Inside, global CPU draws come from (seed, 'model-init'); after it, the global state is what it was before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "model-init"))
        yield
