"""Finds a model's attentions by the exact child names of known layouts; checks their shapes against the config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .wrappers import find_places, modules_by_path, unwrap

LAYOUTS = {
    # architectures: query, key, value and output, relative to the module that holds the four
    "BERT, RoBERTa, ELECTRA": ("self.query", "self.key", "self.value", "output.dense"),
    "DeBERTa": ("self.in_proj", "self.in_proj", "self.in_proj", "output.dense"),
    "DeBERTa-v2, DeBERTa-v3": ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense"),
    "ALBERT": ("query", "key", "value", "dense"),
    "DistilBERT": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "Llama, Mistral, Qwen, Gemma": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "OPT, BART": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "Phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "ModernBERT's decoder": ("q_proj", "k_proj", "v_proj", "Wo"),
    "T5": ("q", "k", "v", "o"),
    "GPT-2, unfused": ("c_attn.query", "c_attn.key", "c_attn.value", "c_proj"),
    "GPT-2": ("c_attn", "c_attn", "c_attn", "c_proj"),
    "Phi-3": ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
    "ModernBERT": ("Wqkv", "Wqkv", "Wqkv", "Wo"),
    "MPT": ("Wqkv", "Wqkv", "Wqkv", "out_proj"),
    "GPT-NeoX, BLOOM": ("query_key_value", "query_key_value", "query_key_value", "dense"),
}
_BY_HEAD = ("query_key_value", "in_proj")
_KNOWN = "; ".join([*LAYOUTS, "torch.nn.MultiheadAttention"])
_CONV1D = "Conv1D"
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")


class RoleError(ValueError):
    """Raised for a weight or an attention of unknown role. The message has its name, its shape and a remedy.

    reason: the message without the remedy."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}{remedy}")
        self.reason = reason


@dataclass(frozen=True)
class Attention:
    """One attention of a model. Paths are those of model.named_modules(); with PEFT they name the LoRA layer.

    name: the module that holds the four projections.
    fused: query, key and value are one layer with (num_heads + 2 num_kv_heads) * head_dim outputs in this order; the
        three paths are equal (GPT-2's c_attn; a torch.nn.MultiheadAttention, whose own path it is).
    by_head: fused head by head: first the query, key and value of head 0, then those of head 1 (GPT-NeoX,
        DeBERTa).
    num_kv_heads: heads of key and value; fewer than num_heads under grouped-query attention.
    """

    name: str
    query: str
    key: str
    value: str
    output: str
    fused: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    by_head: bool = False


def find_attention(model: nn.Module) -> list[Attention]:
    """Every attention of the model (PEFT-wrapped or not), in module order; [] for a model that has none.

    Heads come from the nearest enclosing module whose config names them (num_attention_heads, num_key_value_heads,
    head_dim or hidden_size), so a backbone inside another module is also found.

    Raises RoleError where a config has attention heads but no known layout is found, where a layout is incomplete or
    has no config, and where a projection's shape does not agree with the config.
    """
    modules = modules_by_path(model)
    places = find_places(modules)
    found: list[Attention] = []
    for path, module in modules.items():
        if found and is_inside(path, found[-1].name):  # children follow their parent directly in named_modules()
            continue
        if isinstance(module, nn.MultiheadAttention):
            found.append(_multihead(places[path].owner, path, module))
        elif layout := _matching_layout(modules, path):
            found.append(_attention(modules, path, layout))
    _refuse_unseen_attention(modules, found)
    return found


def strange_attentions(modules: dict[str, nn.Module]) -> list[str]:
    """Paths of the modules whose class name contains "Attention", of known or unknown layout."""
    return [path for path, module in modules.items() if "Attention" in type(module).__name__]


def is_inside(path: str, container: str) -> bool:
    """Whether the module at `path` is `container` or below it; the root '' contains everything."""
    return not container or path == container or path.startswith(container + ".")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the Conv1D of GPT-2: a linear layer whose weight is stored transposed, [in, out]."""
    return type(module).__name__ == _CONV1D and isinstance(getattr(module, "nf", None), int)


def _stems_from_conv1d(layer: nn.Module) -> bool:
    """Whether the layer is a Conv1D, or a quantised linear layer by which transformers replaced a Conv1D."""
    return is_conv1d(layer) or getattr(getattr(layer, "source_cls", None), "__name__", None) == _CONV1D


def features(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer, None for any other. Read from attributes, since quantised weights are packed."""
    layer = unwrap(module)
    if is_conv1d(layer):
        rows, columns = layer.get_parameter("weight").shape
        return rows, columns
    inputs, outputs = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def _matching_layout(modules: dict[str, nn.Module], path: str) -> list[str] | None:
    """The four paths of the layout whose query, key, value and output are all children of the module at `path`."""
    partial: list[str] = []
    for layout in LAYOUTS.values():
        *projections, output = [f"{path}.{child}".lstrip(".") for child in layout]
        if all(projection in modules for projection in projections):
            if output in modules:
                return [*projections, output]
            partial.append(output)
    if partial:
        raise RoleError(
            f"{path or type(modules[path]).__name__} has the query, key and value of an attention but no output "
            f"projection: expected {' or '.join(partial)}. Known layouts: {_KNOWN}"
        )
    return None


def _attention(modules: dict[str, nn.Module], path: str, layout: list[str]) -> Attention:
    query, key, value, output = layout
    fused, child = query == key, query.rpartition(".")[-1]
    heads, kv_heads, head_dim = _head_counts(modules, path, query, 3 if fused else 1)
    inner, kv_inner = heads * head_dim, kv_heads * head_dim
    layer = unwrap(modules[query])
    if child == "c_attn" and not _stems_from_conv1d(layer):
        kind = type(layer).__name__
        raise RoleError(f"{query} is a {kind}; the order of query, key and value is known only in GPT-2's {_CONV1D}")
    outputs = {query: inner + 2 * kv_inner} if fused else {query: inner, key: kv_inner, value: kv_inner}
    for projection, expected in outputs.items():
        _check(modules, projection, "outputs", expected, f"{heads} heads, {kv_heads} key-value heads of {head_dim}")
    _check(modules, output, "inputs", inner, f"{heads} heads of {head_dim}")
    return Attention(path, query, key, value, output, fused, heads, kv_heads, head_dim, child in _BY_HEAD)


def _multihead(owner: str, path: str, module: nn.MultiheadAttention) -> Attention:
    output = f"{path}.out_proj".lstrip(".")
    return Attention(owner, owner, owner, owner, output, True, module.num_heads, module.num_heads, module.head_dim)


def _check(modules: dict[str, nn.Module], path: str, side: str, expected: int, reason: str) -> None:
    """Raise RoleError unless the linear layer at `path` has `expected` inputs or outputs."""
    sizes = features(modules[path])
    if sizes is None:
        raise RoleError(f"{path} should be a linear layer, found {type(unwrap(modules[path])).__name__}")
    found = sizes[0] if side == "inputs" else sizes[1]
    if found != expected:
        raise RoleError(f"{path}.weight has {found} {side}, expected {expected} from the config ({reason})")


def _head_counts(modules: dict[str, nn.Module], path: str, query: str, parts: int) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim) from the nearest enclosing config that names heads.

    parts: the number of equal parts of the outputs at `query`: 3 for a fused query, key and value, else 1."""
    config = next((c for c in _configs(modules, path) if getattr(c, "num_attention_heads", None)), None)
    if config is None or not _num_heads(config):
        # The config has one number of heads per stage, or there is no config.
        if counted := _own_heads(modules, path, query, parts):
            return counted
        raise RoleError(
            f"{path or type(modules[path]).__name__} is laid out as attention, but no enclosing module has a config "
            "with num_attention_heads: give the model one, for example "
            "model.config = SimpleNamespace(num_attention_heads=12, hidden_size=768)"
        )
    heads = _num_heads(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        hidden = getattr(config, "hidden_size", None)
        if not isinstance(hidden, int) or hidden % heads:
            raise RoleError(f"{type(config).__name__} has {heads} heads but hidden_size {hidden} and no head_dim")
        head_dim = hidden // heads
    for holder in _holders(path, query):  # the module's own number of heads, if it has one, must agree
        for attribute in _HEAD_COUNTS:
            own = getattr(modules[holder], attribute, heads)
            if isinstance(own, int) and own != heads:
                raise RoleError(f"{holder}.{attribute} is {own}, but {type(config).__name__} has {heads} heads")
    return heads, kv_heads, head_dim


def _own_heads(modules: dict[str, nn.Module], path: str, query: str, parts: int) -> tuple[int, int, int] | None:
    """As _head_counts, from the attention's own attributes; None if no number of heads divides its queries."""
    sizes = features(modules[query])
    for holder in _holders(path, query):
        for attribute in _HEAD_COUNTS:
            heads = getattr(modules[holder], attribute, None)
            if isinstance(heads, int) and sizes is not None and heads > 0 and sizes[1] % (parts * heads) == 0:
                return heads, heads, sizes[1] // (parts * heads)
    return None


def _holders(path: str, query: str) -> tuple[str, str]:
    """The modules that may have a number of heads: the attention, and the parent of its query."""
    return path, query.rpartition(".")[0]


def _configs(modules: dict[str, nn.Module], path: str) -> Iterator[object]:
    """The configs of the module at `path` and of all enclosing modules, innermost first."""
    while True:
        yield getattr(modules[path], "config", None)
        if not path:
            return
        path = path.rpartition(".")[0]


def _num_heads(config: object) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else 0


def _refuse_unseen_attention(modules: dict[str, nn.Module], found: list[Attention]) -> None:
    """Raise RoleError if a config has attention heads but no attention was found in any module that carries it."""
    seen = [config for attention in found for config in _configs(modules, attention.name)]
    for path, module in modules.items():
        config = getattr(module, "config", None)
        if _num_heads(config) and config not in seen:  # compare by value: PEFT copies a head with its config
            where = f" (at {path})" if path else ""
            raise RoleError(
                f"{type(module).__name__}{where}: its {type(config).__name__} has {_num_heads(config)} heads, "
                f"but no known attention layout was found in it. Known layouts: {_KNOWN}"
            )
