"""The blocks of parameters that a module keeps beside its layers: tokens, attention biases, experts, state spaces.

A parameter is recognised by its exact name, or by what its module says of it; never by its shape alone. FedAdamW's
Appendix D names none of these: the blocks are our choice, by the appendix's rule of one block per output or token.
"""

from __future__ import annotations

import torch
from torch import nn

from .layout import Run, Tile

TOKENS = frozenset((
    "cls_token", "class_token", "mask_token", "dist_token", "distillation_token", "register_tokens", "query_tokens",
    "position_embeddings", "position_embedding", "positional_embedding", "pos_embed",
))  # fmt: skip
"""[tokens, hidden] or [1, tokens, hidden]: one block per token or position."""

HEAD_BIASES = frozenset(("relative_position_bias_table",))
"""[positions, heads]: one block per head."""

CHANNELS = frozenset(("A_log",))
"""[channels, states] of Mamba's state space: one block per channel."""


def bare_tile(name: str, module: nn.Module, shape: torch.Size) -> Tile | None:
    """The blocks of a parameter of `module` itself; None if it is not known. shape: of two dimensions or more."""
    leaf = name.rpartition(".")[2]
    if leaf in TOKENS and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
        return _rows(name, "embedding", "row", shape)
    if leaf in HEAD_BIASES and len(shape) == 2:
        return Tile(name, "attention bias", (Run("head", shape[1], 1),), repeats=shape[0])
    if leaf in CHANNELS and len(shape) == 2:
        return _rows(name, "state space", "row", shape)
    if len(shape) == 3 and getattr(module, "is_transposed", None) is False:  # transformers: experts [E, out, in]
        return _rows(name, "experts", "expert row", shape)
    if leaf == "weight" and len(shape) == 2 and type(module).__name__.endswith("Router"):  # [experts, in]
        return _rows(name, "router", "row", shape)
    return None


def _rows(name: str, role: str, label: str, shape: torch.Size) -> Tile:
    """One block for each row of the last dimension."""
    return Tile(name, role, (Run(label, shape[:-1].numel(), shape[-1]),))
