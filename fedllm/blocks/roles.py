"""The blocks of every tensor by its role. The role follows from the tensor's layer and its place in the module tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .attention import Attention, RoleError, features, find_attention, is_conv1d, is_inside, strange_attentions
from .bare_parameters import bare_tile
from .layout import Run, Tile, whole
from .wrappers import LAYER, Place, find_places, is_wrapper, modules_by_path, unwrap

FUSED = "query, key, value"
OUTPUT = "attention output"
UNKNOWN = "unknown"
_BY_ROW = ("lora_A", "lora_embedding_A", "lora_embedding_B")
_MULTIHEAD = {"in_proj_weight": FUSED, "q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}
POSITIONS = {  # DeBERTa's projections of relative positions, beside the query
    "pos_key_proj": "key", "pos_query_proj": "query", "pos_proj": "key", "pos_q_proj": "query",
}  # fmt: skip
_ADVICE = "pass unknown='tensor' to give every weight without a role one block"


def role_tiles(model: nn.Module, shapes: dict[str, torch.Size], unknown: str) -> list[Tile]:
    """The blocks of each named parameter, in order.

    Raises RoleError naming the weights that have no role (unknown='error'), and if find_attention raises it.
    """
    roles = Roles.of(model, unknown, shapes)
    tiles = {name: roles.tile(name, shape) for name, shape in shapes.items()}
    if unknown == "error":
        _refuse((name, shapes[name]) for name, tile in tiles.items() if tile.role == UNKNOWN)
    return list(tiles.values())


def _refuse(strangers: Iterable[tuple[str, torch.Size]]) -> None:
    listed = [f"{name} {list(shape)}" for name, shape in strangers]
    if listed:
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise RoleError(f"no known role, so no blocks, for {', '.join(listed[:5])}{more}", f": {_ADVICE}")


@dataclass(frozen=True)
class Roles:
    """The roles of a model's layers, as found in its module tree.

    projections: layer path -> its role in an attention, and that attention.
    attentions: paths of attentions; inside them, a linear layer that is no known projection has no role. Neither has a
        convolution inside an attention of unknown layout.
    """

    modules: dict[str, nn.Module]
    places: dict[str, Place]
    projections: dict[str, tuple[str, Attention]]
    attentions: list[str]

    @classmethod
    def of(cls, model: nn.Module, unknown: str, wanted: Iterable[str]) -> Roles:
        """Finds the roles of a model's layers.

        If an attention is of unknown layout and has none of the parameters `wanted`, only its own layers have no role.
        If it has some, unknown='error' raises RoleError; unknown='tensor' leaves every linear layer without a role."""
        modules = modules_by_path(model)
        places = find_places(modules)
        try:
            found = find_attention(model)
        except RoleError as error:
            strange = strange_attentions(modules)
            if strange and not any(is_inside(name, path) for name in wanted for path in strange):
                return cls(modules, places, {}, strange)
            if unknown == "error":
                raise RoleError(error.reason, f"; {_ADVICE}") from None
            return cls(modules, places, {}, [""])
        projections: dict[str, tuple[str, Attention]] = {}
        for attention in found:
            inputs = (FUSED, FUSED, FUSED) if attention.fused else ("query", "key", "value")
            paths = (attention.query, attention.key, attention.value, attention.output)
            projections |= {path: (role, attention) for path, role in zip(paths, (*inputs, OUTPUT), strict=True)}
            holder = attention.query.rpartition(".")[0]
            positions = {f"{holder}.{child}".lstrip("."): (role, attention) for child, role in POSITIONS.items()}
            projections |= {path: found for path, found in positions.items() if path in modules}
        return cls(modules, places, projections, [attention.name for attention in found])

    def tile(self, name: str, shape: torch.Size) -> Tile:
        """The blocks of one tensor. A tensor without a role is one block of role UNKNOWN."""
        if len(shape) < 2:
            return whole(name, "vector", shape.numel())
        tile = self._matrix_tile(name, shape)
        if tile is None and len(shape) > 2 and max(shape) == shape.numel():  # a vector, shaped to be multiplied with
            return whole(name, "vector", shape.numel())
        # An adapter or a packed weight of unexpected shape gives a tile that does not cover its tensor.
        if tile is None or tile.dim != shape.numel():
            return whole(name, UNKNOWN, shape.numel())
        return tile

    def _matrix_tile(self, name: str, shape: torch.Size) -> Tile | None:
        path, _, leaf = name.rpartition(".")
        module, place = self.modules[path], self.places[path]
        part = leaf if is_wrapper(module) else place.part
        role, attention = self._layer_role(place.owner)
        if part in _BY_ROW:
            return _tile(name, f"{role} {part}", _neurons(role, None, shape[0]), shape)
        if part == LAYER and (bare := bare_tile(name, module, shape)):
            return bare
        if role == UNKNOWN:
            return None
        if part == "lora_B":
            return _tile(name, f"{role} {part}", _neurons(role, attention, shape[0]), shape)
        if part != LAYER:
            return None
        if isinstance(module, _ConvNd):
            return _filters(name, role, module, shape) if leaf == "weight" else None
        if isinstance(module, nn.MultiheadAttention):
            role = _MULTIHEAD[leaf]  # a MultiheadAttention has no other matrices
        elif leaf != "weight" or shape != _weight_shape(module):
            return None
        transposed = is_conv1d(module)
        return _tile(name, role, _neurons(role, attention, shape[1 if transposed else 0]), shape, transposed)

    def _layer_role(self, owner: str) -> tuple[str, Attention | None]:
        """The role of the layer at a path, with its attention if it is a projection of one."""
        if owner in self.projections:
            return self.projections[owner]
        layer = unwrap(self.modules[owner])
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            return "embedding", None
        inside = any(is_inside(owner, attention) for attention in self.attentions)
        if isinstance(layer, _ConvNd) and (self.projections or not inside):  # none in an attention of unknown layout
            return "convolution", None
        return (UNKNOWN if inside or features(layer) is None else "linear"), None


def _neurons(role: str, attention: Attention | None, count: int) -> tuple[Run, ...]:
    """The blocks of a layer's `count` output neurons, widths in neurons: per head in query and key, else per neuron."""
    if attention is None or role not in ("query", "key", FUSED):
        return (Run("row", count, 1),)
    query = Run("head", attention.num_heads, attention.head_dim)
    key = Run("head", attention.num_kv_heads, attention.head_dim)
    if role != FUSED:
        return (query,) if role == "query" else (key,)
    query, key = replace(query, label="query head"), replace(key, label="key head")
    value = Run("value row", attention.num_kv_heads * attention.head_dim, 1)
    if not attention.by_head:
        return query, key, value
    width = attention.head_dim
    return tuple(
        part
        for head in range(attention.num_heads)
        for part in (
            replace(query, count=1, first=head),
            replace(key, count=1, first=head),
            replace(value, count=width, first=head * width),
        )
    )


def _tile(name: str, role: str, neurons: tuple[Run, ...], shape: torch.Size, transposed: bool = False) -> Tile:
    """The tile of a tensor [out, in, ...], or of one stored [in, out], from the blocks of its output neurons."""
    if transposed:
        columns = tuple(replace(run, label=run.label.replace("row", "column")) for run in neurons)
        return Tile(name, role, columns, repeats=shape[0])
    return Tile(name, role, tuple(replace(run, width=run.width * shape[1:].numel()) for run in neurons))


def _filters(name: str, role: str, layer: _ConvNd, shape: torch.Size) -> Tile | None:
    """The tile of a convolution [out, in, ...] by output filter; of a transposed one [in, out, ...] without groups."""
    if not isinstance(layer, _ConvTransposeNd):
        return _tile(name, role, (Run("filter", shape[0], 1),), shape)
    if layer.groups > 1:
        return None
    return Tile(name, role, (Run("filter", shape[1], shape[2:].numel()),), repeats=shape[0])


def _weight_shape(module: nn.Module) -> tuple[int, int] | None:
    """The shape of a layer's weight when not quantised; None for a layer that is neither linear nor an embedding."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.num_embeddings, module.embedding_dim
    sizes = features(module)
    if sizes is None:
        return None
    return sizes if is_conv1d(module) else sizes[::-1]
