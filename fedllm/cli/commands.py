"""The `fedllm` command: parses what was typed, calls the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from fedllm import __version__
from fedllm.cli import completion, federation, inspection, new, results, trained, training
from fedllm.cli.options import (
    CommandParser,
    Handler,
    alone_with_torchrun,
    one_speaks,
    speaks,
    wait_for_the_one_that_prints,
)
from fedllm.common.errors import Interrupted, RunError, UserError

_EXIT_CODES = """\
exit codes:
  0    done
  1    a run that could not go on (too few clients left, a full disk); its last checkpoint, if any, is intact
  2    a mistake in what was given: a recipe, an option, a file or a folder
  75   run.max_hours is over; the same command goes on
  141  the program that reads the output has ended, as in `fedllm list | head -3`
  129, 130, 138, 143  ended by SIGHUP, SIGINT (Ctrl-C), SIGUSR1 or SIGTERM; the same command goes on

A signal ends a run, a sweep or a suite after the round that is under way, with a checkpoint; where no round is under
way it ends the command at once. A second Ctrl-C ends it at once, and the rounds since the last checkpoint are trained
again. Under torchrun the exit code is then 0 instead of 75 or above, since torchrun starts failed processes again.
"""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_READER_ENDED = 141  # 128 + SIGPIPE, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, see `fedllm --help`."""
    parser = make_parser()
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
        code = handler(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (UserError, RunError) as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        return _stop_writing()
    except OSError as error:
        return _fail_files(error)
    except Interrupted as interrupt:
        return _fail(str(interrupt), interrupt.exit_code)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal shows ^C where the line ends
        resumed = "; the same command goes on where it was" if arguments.resumes else ""
        return _fail(f"interrupted{resumed}", 130)


def _stop_writing() -> int:
    """Where the program that reads the output has ended, such as head."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer would fail again when Python ends
    return _READER_ENDED


def _fail_files(error: OSError) -> int:
    """Where a file or the terminal cannot be used."""
    if error.filename is not None and error.errno not in _FULL:
        what = f"{error.filename}: cannot be used ({error.strerror})"
        return _fail(f"{what}; look at what is there and who may write to it, or name another place", 2)
    if error.errno not in _FULL:
        raise error
    try:
        sys.stdout.flush()
    except OSError:  # what is left in the buffer would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    where = error.filename or "a file or the output"
    return _fail(f"{where} cannot be written ({error.strerror}); make room and start the same command again", 1)


def _fail(text: str, code: int) -> int:
    if not speaks():
        if not alone_with_torchrun():
            return code
        wait_for_the_one_that_prints()
    print(f"fedllm: {text}", file=sys.stderr)
    return code


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="fedllm",
        description="Federated fine-tuning of text classifiers, language models and image classifiers.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedllm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for group in (training, new, federation, results, trained, inspection, completion):
        group.add_commands(commands)
    return parser
