"""The `fedllm` command: parses what was typed, calls the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedllm import __version__
from fedllm.cli import inspection, results, training
from fedllm.cli.options import CommandParser, Handler, one_speaks, speaks
from fedllm.common.errors import RunError, UserError

_EXIT_CODES = """\
exit codes:
  0    done
  1    a run that could not go on (too few clients left, a full disk); its last checkpoint is intact
  2    a mistake in what was given: a recipe, an option, a file or a folder
  130  interrupted (Ctrl-C); the same command goes on where the run was
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, see `fedllm --help`."""
    parser = _parser()
    with one_speaks():
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        arguments, rest = parser.parse_known_args(argv)
        # argparse takes positionals in one run only: overrides after an option arrive here.
        if rest and (any(word.startswith("-") for word in rest) or not hasattr(arguments, "overrides")):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    handler: Handler = arguments.handler
    try:
        return handler(arguments)
    except UserError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: cannot be used ({error.strerror})"
        return _fail(UserError(f"{what}; look at what is there and who may write to it, or name another place"), 2)
    except KeyboardInterrupt:
        resumed = "; the same command goes on where it was" if arguments.resumes else ""
        print(f"\ninterrupted{resumed}", file=sys.stderr)
        return 130


def _fail(error: Exception, code: int) -> int:
    if speaks():
        print(f"fedllm: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedllm",
        description="Federated LoRA fine-tuning.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedllm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for group in (training, results, inspection):
        group.add_commands(commands)
    return parser
