"""A chat with a run's language model, on a terminal or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fedllm.common.console import console, say, warn
from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import ASSISTANT, USER, Message
from fedllm.experiment.answerer import Answerer
from fedllm.experiment.inference import Inference
from fedllm.experiment.trained import load_trained

NEW, QUIT = "/new", "/quit"


def talk(folder: str | Path, round: int | None = None, temperature: float = 0.0, new_tokens: int = 256) -> None:
    """Reads a message per line from stdin and writes the answers to stdout, each while it comes; see `fedllm chat`.

    Earlier messages stay part of the conversation, until a line /new; with a template for one prompt (alpaca, none)
    every line is a conversation of its own. It ends with the input or a line /quit. Other output goes to stderr.
    Raises UserError for a run without a language model; from a pipe also where a conversation grows too long.
    """
    console.stderr = True
    answerer = Answerer(Inference(load_trained(folder, round)))
    typed = sys.stdin.isatty()
    if typed:
        say(f"{folder}; {NEW} begins a new conversation, {QUIT} ends", "dim")
    messages: list[Message] = []
    for line in _lines(typed):
        if line == QUIT:
            return
        if line == NEW:
            messages = []
        elif line:
            messages = _reply(answerer, [*messages, Message(USER, line)], typed, temperature, new_tokens)


def _lines(typed: bool) -> Iterator[str]:
    """The lines of stdin without blanks around them; on a terminal with a prompt."""
    try:
        while True:
            if typed:
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = sys.stdin.readline()
            if not line:
                return
            yield line.strip()
    except UnicodeDecodeError as error:
        raise UserError("the input is not UTF-8 text; send it as UTF-8") from error


def _reply(
    answerer: Answerer, messages: list[Message], typed: bool, temperature: float, new_tokens: int
) -> list[Message]:
    """Writes the answer; the messages that the next question continues."""
    try:
        answer = answerer.stream(messages, new_tokens, _write, temperature)
    except UserError as error:
        if not typed:
            raise
        warn(f"{error}; a new conversation begins")
        return []
    _write("\n")
    return [*messages, Message(ASSISTANT, answer)] if answerer.remembers else []


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
