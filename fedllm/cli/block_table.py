"""The command `fedllm blocks`: the block partition of a model, as a table and as a picture."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fedllm.blocks import RoleError, partition
from fedllm.common.console import console, say, warn
from fedllm.common.errors import UserError
from fedllm.models.lora_targets import find_targets
from fedllm.models.outline import add_lora, highest_rank, load_outline
from fedllm.models.settings import LoraSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def print_blocks(arguments: argparse.Namespace) -> int:
    """Prints the blocks of a model's trained weights under LoRA, or of all its weights, and draws them if asked.

    Says so and takes all weights if no roles were asked for and query and value are not to be had.
    """
    name = arguments.model
    outline = load_outline(name)
    model = None if arguments.full else _with_lora(outline, name, arguments.rank, arguments.targets)
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


def _with_lora(outline: PreTrainedModel, name: str, rank: int, asked: str | None) -> PeftModel | None:
    """The model with LoRA on the layers of the roles asked for.

    asked: roles, separated by commas. If it is None, on query and value, or None if the model has no such layers.
    """
    try:
        targets = find_targets(outline, name, _roles(asked) if asked else ["query", "value"])
    except UserError as error:
        if asked:
            raise
        warn(f"{name}: LoRA on query and value is not possible ({error}). The table shows all weights, as with --full.")
        return None
    if not 1 <= rank <= (highest := highest_rank(outline, targets)):
        raise UserError(f"--rank: found {rank}, expected 1 to {highest}, the smallest side of {name}'s projections")
    return add_lora(outline, targets, rank)


def _roles(asked: str) -> list[str]:
    """The roles of `--targets`. Raises UserError for an unknown one."""
    try:
        return list(LoraSettings(targets=asked.split(",")).targets)
    except UserError as error:
        raise UserError(f"--{error}") from None
