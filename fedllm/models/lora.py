"""LoRA on a backbone: low-rank updates beside chosen linear layers, trained together with the task head."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedllm.aggregation.product_gap import Product
from fedllm.blocks.attention import features
from fedllm.common.errors import UserError
from fedllm.common.seeding import torch_rng
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.loading import Backbone
from fedllm.models.lora_targets import find_targets
from fedllm.models.settings import LoraSettings

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model's own modules."""


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attach_lora(backbone: Backbone, lora: LoraSettings, *, seed: int = 0) -> PeftModel:
    """Adds LoRA to the backbone's model, in place, and returns it as a PEFT model in eval mode.

    Only LoRA and the head are trainable, and of LoRA only B if `lora.train` is B. Every layer whose role is in
    `lora.targets` (`lora_targets.find_targets`) becomes y = W x + s B A x, with A [rank, in], B [out, rank] and
    s = alpha / rank, or alpha / sqrt(rank) if `lora.scaling` is rslora. With `lora.dora` (DoRA, Liu et al. 2024, eq. 5)
    it becomes y = diag(m / n) (W + s B A) x, where n [out] are the lengths of the rows of W + s B A, which get no
    gradient (section 4.3), and m [out] is trained. Trainable parameters are float32, whatever the dtype of the
    backbone.

    Initial values, where i counts the LoRA tensors and, apart from them, the head tensors:
    A ~ U(-1/sqrt(in), 1/sqrt(in)) from (seed, 'lora-init', i); B = 0; m = the lengths of the rows of W; a new head's
    Linear weights ~ N(0, initializer_range) from (seed, 'head-init', i); its biases = 0. A head that `backbone.start`
    keeps has the checkpoint's values.

    Raises UserError: rank < 1 or above a layer's smaller side, alpha <= 0, dropout outside [0, 1), roles that the model
    does not have or that cannot be adapted, or a model that already has LoRA.
    """
    _check(lora)
    model = backbone.model
    if lora_layers(model):
        raise UserError(f"model '{backbone.name}': LoRA is attached already; load the backbone again for another")
    targets = find_targets(model, backbone.name, lora.targets)
    _check_rank(model, lora.rank, targets)
    start_head(model, backbone, seed)
    names = [name for name, _ in model.named_modules()]
    config = LoraConfig(
        task_type=None if backbone.task_type is None else TaskType(backbone.task_type),
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_rslora=lora.scaling == "rslora",
        use_dora=lora.dora,
        target_modules=shortest_suffixes(targets, names),
        modules_to_save=list(backbone.head),
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            adapted = get_peft_model(model, config)
        except ValueError as cause:
            raise UserError(f"model '{backbone.name}': PEFT cannot adapt it: {cause}") from cause
    _check_trained(adapted, backbone, targets)
    _start_lora(adapted, seed)
    if lora.train == "B":
        _freeze_a(adapted)
    return adapted.eval()


def trainable_names(model: nn.Module) -> list[str]:
    """The names of the trainable parameters in named_parameters() order: the order of the flat vector."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers that have LoRA, by their path in the model without PEFT."""
    return {n.removeprefix(PREFIX): m for n, m in model.named_modules() if isinstance(m, LoraLayer)}


def lora_products(space: ParameterSpace) -> tuple[Product, ...]:
    """Where the flat vector of a model with LoRA has the B and, if it is trained, the A of each layer."""
    ends = list(itertools.accumulate(space.sizes))
    places = {name: slice(end - size, end) for name, size, end in zip(space.names, space.sizes, ends, strict=True)}
    shapes = dict(zip(space.names, space.shapes, strict=True))
    return tuple(
        Product(places[name], places.get(name.replace(".lora_B.", ".lora_A.")), shapes[name][1])
        for name in space.names
        if ".lora_B." in name
    )


def lora_turns(space: ParameterSpace) -> list[Tensor]:
    """The coordinates that rounds train in turn under `lora.train: turns`: B with the head, and A.

    RoLoRA (Chen et al. 2025, Alg. 1) has no head. *choice*: it is trained with B, so that every coordinate is in one
    turn. B comes first, because A has no gradient while B is 0."""
    sets: dict[bool, list[Tensor]] = {False: [], True: []}
    end = 0
    for name, size in zip(space.names, space.sizes, strict=True):
        sets[".lora_A." in name].append(torch.arange(end, end + size))
        end += size
    return [torch.cat(sets[False]), torch.cat(sets[True])]


def head_modules(model: nn.Module) -> list[str]:
    """Paths, in the model without PEFT, of the modules whose weights are all trained."""
    return [n.removeprefix(PREFIX) for n, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)]


def shortest_suffixes(paths: Iterable[str], names: Sequence[str]) -> list[str]:
    """The shortest path endings, in whole parts, that match all of `paths` and no other of `names`, as PEFT matches.

    For example ['query', 'value'] instead of 24 paths, or 'attention.output.dense' if 'dense' matches other modules.
    """
    wanted = set(paths)
    endings = set()
    for path in wanted:
        parts = path.split(".")
        tails = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        endings.add(next(tail for tail in tails if wanted.issuperset(n for n in names if f".{n}".endswith(f".{tail}"))))
    return sorted(endings)


def _check(lora: LoraSettings) -> None:
    if lora.rank < 1:
        raise UserError(f"lora.rank: found {lora.rank}, expected at least 1")
    if not (lora.alpha > 0 and math.isfinite(lora.alpha)):
        raise UserError(f"lora.alpha: found {lora.alpha}, expected a number above 0")
    if not 0 <= lora.dropout < 1:
        raise UserError(f"lora.dropout: found {lora.dropout}, expected a rate in [0, 1)")


def _check_rank(model: nn.Module, rank: int, targets: list[str]) -> None:
    for path in targets:
        sides = features(model.get_submodule(path))
        if sides and rank > min(sides):
            raise UserError(f"lora.rank: found {rank}, expected at most {min(sides)}, the smaller side of {path}")


def _check_trained(adapted: PeftModel, backbone: Backbone, targets: list[str]) -> None:
    """Raises UserError if PEFT trains other modules than the targets and the head.

    PEFT matches modules by the ends of their names, and always trains modules called 'classifier' and 'score' whole.
    """
    if surplus := (set(lora_layers(adapted)) ^ set(targets)) | (set(head_modules(adapted)) ^ set(backbone.head)):
        raise UserError(f"model '{backbone.name}': PEFT cannot tell modules apart: {', '.join(sorted(surplus))}")


def start_head(model: nn.Module, backbone: Backbone, seed: int) -> None:
    """Converts the head to float32 and, unless the checkpoint's is kept, initialises its Linear layers.

    Its other parameters keep their values.
    """
    std = getattr(model.config, "initializer_range", 0.02)
    ordinals = itertools.count()
    for path in backbone.head:
        module = model.get_submodule(path).float()
        module.register_forward_pre_hook(_in_float32)
        if backbone.start.kept:
            continue
        for name, parameter in module.named_parameters():
            ordinal, (owner, _, kind) = next(ordinals), name.rpartition(".")
            if isinstance(module.get_submodule(owner), nn.Linear):
                start = torch.zeros(parameter.shape)
                if kind == "weight":
                    start.normal_(0.0, std, generator=torch_rng(seed, "head-init", ordinal))
                parameter.data.copy_(start)


def _in_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook that converts the hidden states of a bfloat16 backbone to float32 for the head."""
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _start_lora(adapted: PeftModel, seed: int) -> None:
    matrices = [(name, value) for name, value in adapted.named_parameters() if ".lora_A." in name or ".lora_B." in name]
    for ordinal, (name, parameter) in enumerate(matrices):
        start = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=torch_rng(seed, "lora-init", ordinal))
        parameter.data.copy_(start)
    for layer in lora_layers(adapted).values():
        for length in layer.lora_magnitude_vector.values():
            length.weight.data = row_lengths(layer.get_base_layer())


def row_lengths(layer: nn.Module) -> Tensor:
    """The lengths [out] of the rows of a linear layer's weights, in float32."""
    lengths: Tensor = torch.linalg.vector_norm(rows_of_weights(layer), dim=1)
    return lengths


def rows_of_weights(layer: nn.Module) -> Tensor:
    """The weights [out, in] of a linear layer in float32. A Conv1D has them as [in, out]."""
    weight: Tensor = layer.get_parameter("weight").detach().float()
    return weight.T if isinstance(layer, Conv1D) else weight


def _freeze_a(adapted: PeftModel) -> None:
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            parameter.requires_grad_(False)
