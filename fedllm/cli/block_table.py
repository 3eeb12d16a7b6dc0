"""The command `fedllm blocks`: the block partition of a model, as a table and as a picture."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fedllm.blocks import RoleError, partition
from fedllm.common.console import console, say, warn
from fedllm.common.errors import UserError
from fedllm.models.outline import add_lora, highest_rank, load_outline, query_and_value

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def print_blocks(arguments: argparse.Namespace) -> int:
    """Prints the blocks of a model's trained weights under LoRA, or of all its weights, and draws them if asked.

    Says so and takes all weights if LoRA does not fit the model.
    """
    name = arguments.model
    outline = load_outline(name)
    model = None if arguments.full else _with_lora(outline, name, arguments.rank)
    try:
        found = partition(
            model or outline, arguments.scheme, trainable_only=model is not None, unknown=arguments.unknown
        )
    except RoleError as error:
        advice = "pass --unknown tensor to give every weight without a role one block"
        raise UserError(f"{name}: {error.reason}: {advice}") from error
    console.print(found.table())
    if arguments.draw:
        from fedllm.reporting.block_picture import write_blocks

        say(f"drawn in {write_blocks(model or outline, found, name, arguments.draw)}")
    return 0


def _with_lora(outline: PreTrainedModel, name: str, rank: int) -> PeftModel | None:
    """The model with LoRA on query and value, or None if it has no layers for them."""
    try:
        targets = query_and_value(outline, name)
    except UserError as error:
        warn(f"{name}: LoRA on query and value is not possible ({error}). The table shows all weights, as with --full.")
        return None
    if not 1 <= rank <= (highest := highest_rank(outline, targets)):
        raise UserError(f"--rank: found {rank}, expected 1 to {highest}, the smallest side of {name}'s projections")
    return add_lora(outline, targets, rank)
