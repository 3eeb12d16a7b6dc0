"""What a sample of a causal language model is: messages of a system, a user and an assistant, or a plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
TEXT = "text"  # the role of the one message of a sample that is a plain text


@dataclass(frozen=True)
class Message:
    """What one side says. input: of an instruction, the text that it is about; "" where there is none."""

    role: str
    content: str
    input: str = ""

    @property
    def whole(self) -> str:
        """The content, and after an empty line the input."""
        return f"{self.content}\n\n{self.input}" if self.input else self.content


@dataclass(frozen=True)
class Conversation:
    """At most one message of the system, then user and assistant in turn, the assistant last; or one message of TEXT.

    options: responses of which the last message is the right one, the one at `answer`; () without a choice.
    """

    messages: tuple[Message, ...]
    options: tuple[str, ...] = ()
    answer: int | None = None

    @property
    def is_text(self) -> bool:
        """Whether the sample is a plain text, which has no turns."""
        return self.messages[0].role == TEXT

    @property
    def turns(self) -> list[int]:
        """The places of the assistant's messages."""
        return [place for place, message in enumerate(self.messages) if message.role == ASSISTANT]

    @property
    def has_system(self) -> bool:
        """Whether it has a system message."""
        return self.messages[0].role == SYSTEM

    def with_system(self, content: str | None) -> Conversation:
        """The conversation with a system message, unless it has one of its own or is a plain text."""
        if content is None or self.has_system or self.is_text:
            return self
        return replace(self, messages=(Message(SYSTEM, content), *self.messages))

    def prompt(self) -> str:
        """All that comes before the last response, as one text: two samples with the same prompt differ in their
        response alone. Of a plain text, the text."""
        if self.is_text:
            return self.messages[0].content
        return "\n".join(f"{message.role}: {message.whole}" for message in self.messages[:-1])

    def exact(self) -> str:
        """A text that is equal for equal conversations alone."""
        messages = [[message.role, message.content, message.input] for message in self.messages]
        return json.dumps([messages, self.options, self.answer])


def prompts(conversations: Iterable[Conversation]) -> list[str]:
    """The prompt of each conversation."""
    return [conversation.prompt() for conversation in conversations]
