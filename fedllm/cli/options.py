"""What the commands have in common: how one is declared, its help, and which process of a launcher prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fedllm.config.shipped_recipes import find_recipe

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["CommandParser"]

Handler = Callable[[argparse.Namespace], int]
_WAIT = 10.0  # seconds


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. keys: gives the text below its help, which is made only when help is printed."""

    keys: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.keys()}\n" if self.keys else "")


def add_command(
    commands: Commands,
    name: str,
    handler: Handler,
    help: str,
    keys: Callable[[], str] | None = None,
    *,
    resumes: bool = False,
) -> CommandParser:
    """Adds a command. handler: called with the parsed arguments; it returns the exit code. keys: see CommandParser.
    resumes: whether the same command goes on where it was after an interrupt."""
    parser = commands.add_parser(name, help=help, description=help)
    parser.keys = keys
    parser.set_defaults(handler=handler, resumes=resumes)
    return parser


def add_recipe(parser: CommandParser) -> None:
    """Adds the arguments RECIPE and section.key=value."""
    parser.add_argument(
        "recipe",
        type=find_recipe,
        help="a recipe's YAML file; recipes/quickstart.yaml and others are found outside a clone, too",
    )
    add_overrides(parser, "for example algorithm.lr=3e-4; null returns a key to its default")


def add_overrides(parser: CommandParser, help: str) -> None:
    """Adds the arguments section.key=value. None is required."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=help)


def recipe_keys() -> str:
    """The keys of a recipe, from the dataclasses."""
    from fedllm.config.key_help import help_text

    return f"Keys of a recipe (YAML, or section.key=value on the command line):\n\n{help_text()}"


def grid_keys() -> str:
    """The keys of a grid file, from the dataclass."""
    from fedllm.sweeps.grid import help_text

    return f"Keys of a grid file:\n\n{help_text()}"


@contextlib.contextmanager
def one_speaks() -> Iterator[None]:
    """For what every process of a launcher does alike before they meet: the first of each machine prints."""
    if speaks():
        yield
        return
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            yield
    except SystemExit as end:
        if end.code and alone_with_torchrun():
            wait_for_the_one_that_prints()
        raise


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports that take seconds: Ctrl-C ends the process at once. As an exception it would pass through libraries
    that turn it into another one while they are imported (numpy)."""

    def leave(*_: object) -> None:
        if speaks():
            os.write(2, b"\nfedllm: interrupted\n")
        os._exit(130)

    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def speaks() -> bool:
    """Whether this process prints a failure. Before the processes have met, the first of each machine does, as a file
    may be missing on one machine alone; after that rank 0 does, which knows of all failures."""
    return os.environ.get("RANK" if _met() else "LOCAL_RANK", "0") == "0"


def alone_with_torchrun() -> bool:
    """Whether torchrun (accelerate starts it as well) started this process, and the processes have not met."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not _met()


def wait_for_the_one_that_prints() -> None:
    """Called by a process that failed before the processes have met, and does not print. torchrun ends every process as
    soon as one has failed, so the one that prints must be the first to end. If that one has not failed, this process
    is still alive afterwards."""
    time.sleep(_WAIT)


def _met() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())
