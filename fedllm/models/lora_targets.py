"""Finds the layers that get LoRA, by their roles (`lora.targets`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from fedllm.blocks import Attention
from fedllm.blocks.attention import features, is_inside
from fedllm.blocks.roles import POSITIONS
from fedllm.common.errors import UserError
from fedllm.models.mlp import LAYOUTS, Mlp, block_of, find_mlps, stacked_experts
from fedllm.models.settings import ALL_LINEAR, ATTENTION_ROLES, MLP, MLP_ROLES
from fedllm.models.structure import FUSED, attentions, linear_projection, split_fused


def find_targets(model: nn.Module, name: str, roles: Collection[str]) -> list[str]:
    """The paths of the layers with these roles (settings.ROLES) in the model called `name`.

    query, key, value, output: the projections of every attention. mlp_in, mlp_gate, mlp_out: the layers of every MLP;
    `mlp`: all that the model has of these three. `all-linear`, which stands alone: every linear layer of every
    transformer block as the model stores it, so GPT-2's four. Heads, poolers and embeddings are outside the blocks.
    DeBERTa's projections of relative positions, which read a table and not the tokens, have no role.

    Where query, key or value is named, GPT-2's fused projection is first split, in place (`structure.SplitQKV`).
    Another fused layer is a target if all its roles are named.

    Raises UserError: a role that the model does not have; a part of a layer that cannot be split; a model without
    attention, with an attention or MLP of unknown layout, or with experts that are no linear layers.
    """
    wanted = set(roles)
    if ALL_LINEAR in wanted:
        return _all_linear(model, name)
    mlp_layers = _mlp_targets(model, name, wanted)  # before the attentions, which are split in place
    found: list[str] = []
    if inputs := [role for role in FUSED if role in wanted]:
        split = split_fused(model, name, inputs)
        found += [getattr(attention, role) for attention in split for role in inputs]
    if "output" in wanted:
        found += [attention.output for attention in attentions(model, name)]
    return list(dict.fromkeys([*found, *mlp_layers]))


def _mlp_targets(model: nn.Module, name: str, wanted: set[str]) -> list[str]:
    """The layers of the MLPs with the wanted roles; [] if none of these is wanted."""
    if not wanted & {MLP, *MLP_ROLES}:
        return []
    found = attentions(model, name)
    mlps = _mlps(model, name)
    _refuse_unknown_mlps(model, name, found, mlps)
    here = [role for role in MLP_ROLES if any(getattr(mlp, role) for mlp in mlps)]
    if lacking := [role for role in MLP_ROLES if role in wanted and role not in here]:
        have = ", ".join([*ATTENTION_ROLES, *here, MLP, ALL_LINEAR])
        raise UserError(
            f"lora.targets: found {', '.join(lacking)}, but model '{name}' ({type(model).__name__}) has none; "
            f"it has {have}"
        )
    asked = [role for role in here if MLP in wanted or role in wanted]
    for mlp in mlps:
        if mlp.mlp_in == mlp.mlp_gate and len({"mlp_in", "mlp_gate"} & set(asked)) == 1:
            raise UserError(
                f"model '{name}': {mlp.mlp_in} is one layer for mlp_in and mlp_gate, which cannot be taken apart; "
                f"name both in lora.targets, or neither"
            )
    return [path for mlp in mlps for role in asked if (path := getattr(mlp, role))]


def _mlps(model: nn.Module, name: str) -> list[Mlp]:
    """The model's MLPs. Raises UserError for experts that are no layers."""
    if experts := stacked_experts(model):
        path, tensor = experts
        module = model.get_submodule(path)
        raise UserError(
            f"model '{name}': {path} ({type(module).__name__}) has the weights of its experts in one tensor, {tensor} "
            f"{list(getattr(module, tensor).shape)}, and not in linear layers, so LoRA cannot adapt the MLP; "
            f"lora.targets=[{', '.join(ATTENTION_ROLES)}] adapts the attention"
        )
    try:
        return find_mlps(model)
    except UserError as cause:
        raise UserError(f"model '{name}': {cause}") from cause


def _refuse_unknown_mlps(model: nn.Module, name: str, found: list[Attention], mlps: list[Mlp]) -> None:
    """Raises UserError for a block with an attention and linear layers beside it, but no MLP of known layout."""
    projections = {path for attention in found for path in _projections(attention)}
    blocks = {block for attention in found if (block := block_of(attention.name))}
    for block in sorted(blocks):
        strange = [path for path in _linear_layers(model, [block]) if path not in projections]
        if strange and not any(is_inside(mlp.name, block) for mlp in mlps):
            raise UserError(
                f"model '{name}': {block} has no MLP of a known layout, but the linear layers {', '.join(strange)}; "
                f"known layouts: {'; '.join(LAYOUTS)}. lora.targets={ALL_LINEAR} adapts them all"
            )
    if not mlps:
        raise UserError(f"model '{name}': {type(model).__name__} has no MLP that LoRA could adapt")


def _all_linear(model: nn.Module, name: str) -> list[str]:
    """The linear layers of every attention, of every MLP, and of every block with an attention."""
    found = attentions(model, name)
    for attention in found:
        linear_projection(model, name, attention)
    mlps = _mlps(model, name)
    known = [path for attention in found for path in _projections(attention)]
    known += [path for mlp in mlps for path in (mlp.mlp_in, mlp.mlp_gate, mlp.mlp_out) if path]
    blocks = {block for attention in found if (block := block_of(attention.name))}
    return list(dict.fromkeys([*known, *_linear_layers(model, blocks)]))


def _projections(attention: Attention) -> tuple[str, str, str, str]:
    return attention.query, attention.key, attention.value, attention.output


def _linear_layers(model: nn.Module, blocks: Collection[str]) -> Iterable[str]:
    """The paths of the linear layers in these blocks that read tokens."""
    for path, module in model.named_modules():
        reads_tokens = path.rpartition(".")[2] not in POSITIONS
        if reads_tokens and features(module) is not None and any(is_inside(path, block) for block in blocks):
            yield path
