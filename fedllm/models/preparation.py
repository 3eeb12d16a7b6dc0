"""What is changed in a model's config and tokenizer while it is loaded: dropout, activation, padding."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fedllm.common.errors import UserError


def set_dropout(config: PreTrainedConfig, rate: float | None) -> None:
    """Sets dropout of attention probabilities to 0 and every other dropout rate of the config to `rate`, if given.

    A rate that is null in the config, which stands for a copy of another rate, is set too.
    """
    for key, value in list(vars(config).items()):
        is_rate = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if is_rate and ("dropout" in key or "pdrop" in key):
            if "att" in key:
                setattr(config, key, 0.0)
            elif rate is not None:
                setattr(config, key, rate)


def fuse_activation(config: PreTrainedConfig) -> None:
    """Replaces GPT-2's activation "gelu_new" by an equal one that is a single operation.

    transformers computes "gelu_new" with eight operations and stores all intermediate results for the backward pass.
    """
    for key, value in list(vars(config).items()):
        if value == "gelu_new":
            setattr(config, key, "gelu_pytorch_tanh")


def set_padding(name: str, net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Pads on the right, with the eos token where a tokenizer has no pad token. Raises UserError where it has neither,
    or more tokens than the model."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"model '{name}': its tokenizer has neither a pad nor an eos token to pad texts with")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    net.config.pad_token_id = tokenizer.pad_token_id
    rows = net.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"model '{name}': its tokenizer has {len(tokenizer)} tokens, but the model only {rows}")


def max_length(net: PreTrainedModel) -> int | None:
    """The number of positions that a text can use. RoBERTa and related models count them from padding_idx + 1."""
    positions: int | None = getattr(net.config, "max_position_embeddings", None)
    tables = (m for n, m in net.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding))
    if positions is None or (table := next(tables, None)) is None or table.padding_idx is None:
        return positions
    return positions - table.padding_idx - 1
