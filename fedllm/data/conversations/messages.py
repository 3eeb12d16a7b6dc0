"""Reads the messages of one sample from a cell: a list of roles and contents, in the words of OpenAI or ShareGPT."""

from __future__ import annotations

import json
from typing import Any

from fedllm.common.errors import cut_name
from fedllm.data.conversations.conversation import ASSISTANT, SYSTEM, USER, Message

_NAMES = (("role", "content"), ("from", "value"))  # of a message's keys
_ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
_TOOLS = ("tool_calls", "function_call", "tools")
_WEIGHTS = ("weight", "train")  # other tools' ways to say which messages are learned


class MessageError(ValueError):
    """What is wrong with a sample's messages: what was found and what was expected, without any text of theirs."""


def read_messages(cell: Any) -> tuple[tuple[Message, ...], bool]:
    """The messages of one sample, and whether a last one of the user was left out, which nothing answers.

    cell: a list of {"role": ..., "content": ...} or {"from": ..., "value": ...}, or the same as JSON text.
    Raises MessageError for another form, an unknown role, roles out of order, no or an empty answer.
    """
    messages = tuple(_message(entry, number) for number, entry in enumerate(_entries(cell), 1))
    unanswered = messages[-1].role == USER and len(messages) > 1
    messages = messages[:-1] if unanswered else messages
    check_order(messages)
    return messages, unanswered


def read_question(cell: Any) -> tuple[Message, ...]:
    """The messages of a cell up to the user's last one, which a model is to answer. Raises MessageError, see
    read_messages."""
    messages = [_message(entry, number) for number, entry in enumerate(_entries(cell), 1)]
    while messages and messages[-1].role == ASSISTANT:
        messages.pop()
    if not messages or messages[-1].role != USER:
        raise MessageError("found no message of role 'user' to answer")
    check_order((*messages, Message(ASSISTANT, "an answer")))
    return tuple(messages)


def check_order(messages: tuple[Message, ...]) -> None:
    """Raises MessageError unless user and assistant take turns, after at most one system message, and none of the
    assistant's messages is empty."""
    spoken = messages[1:] if messages[0].role == SYSTEM else messages
    first = len(messages) - len(spoken) + 1
    for number, message in enumerate(spoken, first):
        expected = (USER, ASSISTANT)[(number - first) % 2]
        if message.role != expected:
            raise MessageError(
                f"message {number} is of role '{message.role}', expected '{expected}': at most one system message, "
                f"then user and assistant in turn"
            )
        if message.role == ASSISTANT and not message.content.strip():
            raise MessageError(f"message {number}: the assistant's answer is empty")
    if not any(message.role == ASSISTANT for message in spoken):
        raise MessageError("found no message of role 'assistant', expected one to learn")


def as_list(cell: str) -> Any:
    """A cell of a CSV, which holds a list as JSON text. Raises MessageError for another text."""
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        raise MessageError("found text, expected a list") from None


def _entries(cell: Any) -> list[Any]:
    cell = as_list(cell) if isinstance(cell, str) else cell
    if not isinstance(cell, list):
        raise MessageError(f"found a value of type {type(cell).__name__}, expected a list of messages")
    if not cell:
        raise MessageError("found no message, expected a user's and an assistant's")
    return cell


def _message(entry: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(entry, dict):
        raise MessageError(f"{where} is of type {type(entry).__name__}, expected an object with role and content")
    names = next((pair for pair in _NAMES if pair[0] in entry), _NAMES[0])
    if missing := [name for name in names if entry.get(name) is None and not _calls(entry)]:
        raise MessageError(f"{where} has no '{missing[0]}', expected role and content")
    if used := _calls(entry):
        raise MessageError(f"{where} has '{used}': tool calls are not supported")
    if given := next((name for name in _WEIGHTS if entry.get(name) is not None), None):
        raise MessageError(f"{where} has '{given}': which messages are learned says data.learn; leave it out")
    role = entry[names[0]]
    if role in ("tool", "function"):
        raise MessageError(f"{where} is of role '{role}': tool calls are not supported")
    if not isinstance(role, str) or role not in _ROLES:
        raise MessageError(f"{where}: found role '{cut_name(role)}', expected system, user or assistant")
    return Message(_ROLES[role], _content(entry[names[1]], where))


def _calls(entry: dict[str, Any]) -> str | None:
    return next((name for name in _TOOLS if entry.get(name)), None)


def _content(content: Any, where: str) -> str:
    if not isinstance(content, str):
        raise MessageError(
            f"{where}: found content of type {type(content).__name__}, expected text (images and tool calls are not "
            f"supported)"
        )
    if not content.isascii() and content.encode("utf-8", "replace").decode() != content:
        raise MessageError(f"{where}: found half of a surrogate pair, expected readable text")
    return content
