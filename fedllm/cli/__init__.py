"""The `fedllm` command."""

from fedllm.cli.commands import main

__all__ = ["main"]
