"""What is done with a conversation that has more tokens than data.max_length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from fedllm.data.conversations.conversation import Conversation
from fedllm.data.conversations.masks import Marked

Encode = Callable[[Conversation], Marked]


def fit(rule: str, found: Marked, conversation: Conversation, encode: Encode, length: int) -> Marked | None:
    """The tokens `found` of a conversation, cut to at most `length`; None if it is to be left out.

    rule: drop; cut_response, which keeps the first `length` tokens; or cut_prompt, see cut_prompt. A plain text has no
    prompt: cut_prompt keeps its first tokens as well. A sample is left out where no learned token would remain.
    """
    if len(found.ids) <= length:
        cut: Marked | None = found
    elif rule == "drop":
        cut = None
    elif rule == "cut_prompt" and not conversation.is_text:
        cut = cut_prompt(conversation, encode, length)
    else:
        cut = found.cut(length)
    return cut if cut is not None and any(cut.learned) else None


def cut_prompt(conversation: Conversation, encode: Encode, length: int) -> Marked | None:
    """The tokens of a conversation without its earliest exchanges, as few as needed; if the last exchange alone is too
    long, without the beginning of its prompt: of its input, then of its content. None if its response does not fit.

    The system message, the template and the response stay whole.
    """
    while len(conversation.turns) > 1:
        conversation = _without_first_exchange(conversation)
        found = encode(conversation)
        if len(found.ids) <= length:
            return found
    place = conversation.turns[0] - 1
    for part in ("input", "content"):
        text = getattr(conversation.messages[place], part)
        first = _first_that_fits(conversation, place, part, encode, length)
        conversation = _with_prompt(conversation, place, part, text[first:])
        if first < len(text):
            return encode(conversation)
    return None


def _first_that_fits(conversation: Conversation, place: int, part: str, encode: Encode, length: int) -> int:
    """The first character of a part of a message from which on it fits; its length if not even the last one does."""
    text = getattr(conversation.messages[place], part)

    def fits(first: int) -> bool:
        return len(encode(_with_prompt(conversation, place, part, text[first:])).ids) <= length

    return bisect_left(range(len(text)), True, key=fits)


def _without_first_exchange(conversation: Conversation) -> Conversation:
    start = int(conversation.has_system)
    messages = conversation.messages
    return replace(conversation, messages=messages[:start] + messages[start + 2 :])


def _with_prompt(conversation: Conversation, place: int, part: str, text: str) -> Conversation:
    messages = list(conversation.messages)
    changed: dict[str, str] = {part: text}
    messages[place] = replace(messages[place], **changed)
    return replace(conversation, messages=tuple(messages))
