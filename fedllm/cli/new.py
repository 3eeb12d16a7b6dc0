"""The command that writes files to start from: new."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import CommandParser, add_command
from fedllm.config.new_recipe import TASKS, write_recipe

if TYPE_CHECKING:
    from fedllm.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Adds new."""
    new = commands.add_parser("new", help="write a file to start from")
    actions = new.add_subparsers(required=True, metavar="WHAT", parser_class=CommandParser)
    recipe = add_command(actions, "recipe", _recipe, "write a recipe for data of your own, with comments")
    recipe.add_argument("file", type=Path, help="the file to write, such as mine.yaml; nothing is overwritten")
    recipe.add_argument("--task", choices=TASKS, default=TASKS[0], help=f"what the model learns (default {TASKS[0]})")


def _recipe(arguments: argparse.Namespace) -> int:
    from fedllm.common.console import say

    write_recipe(arguments.file, arguments.task)
    say(f"{arguments.file}: name your data in it, then try `fedllm run {arguments.file} --dry-run`")
    return 0
