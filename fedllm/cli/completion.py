"""The command that prints the completion of a shell: completion."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import add_command
from fedllm.config.shipped_recipes import find_recipe

if TYPE_CHECKING:
    from fedllm.cli.options import Commands

SHELLS = ("bash", "zsh", "tcsh")
_INSTALLED = """\
To install it:

  bash  fedllm completion bash > ~/.local/share/bash-completion/completions/fedllm
  zsh   fedllm completion zsh > ~/.zsh/_fedllm, with fpath=(~/.zsh $fpath) before compinit in ~/.zshrc
  tcsh  fedllm completion tcsh > ~/.fedllm.csh, with source ~/.fedllm.csh in ~/.tcshrc
"""


def add_commands(commands: Commands) -> None:
    """Adds completion."""
    help = "print the completion of commands, options and files for your shell"
    parser = add_command(commands, "completion", _completion, help, lambda: _INSTALLED)
    parser.add_argument("shell", choices=SHELLS)


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    from fedllm.cli.commands import make_parser

    parser = make_parser()
    _complete_files(parser)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments that name files and folders."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.type in (Path, find_recipe):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
