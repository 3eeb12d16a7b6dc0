"""The texts that a template makes of a conversation: up to where each response begins, and up to where it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import ASSISTANT, SYSTEM, USER, Conversation, Message

_MADE_OF_TEXT = ("alpaca", "none")
_NO_TEMPLATE = "expected data.template: alpaca, none (plain text), or a .jinja file with a chat template"
# For templates that write today's date into the prompt: a run's tokens are the same on every day.
_FIXED_DATE = (
    '{%- macro strftime_now(format) -%}{{ "26 Jul 2024" if format == "%d %b %Y" else "2024-07-26" }}{%- endmacro -%}\n'
)


class TemplateError(ValueError):
    """Why a template has no place for a conversation; it has no text of the conversation."""


@dataclass(frozen=True)
class Turn:
    """One response within its conversation. before: the text up to where the response begins, with the words that
    announce it. after: the same text and the response."""

    before: str
    after: str


class Template(ABC):
    """Writes conversations as text. marks_end: whether it puts an end-of-turn token behind a response itself."""

    marks_end: bool

    @abstractmethod
    def turns(self, conversation: Conversation, places: Sequence[int]) -> list[Turn]:
        """The responses at `places` of a conversation's messages. Raises TemplateError."""


def find_template(name: str | None, tokenizer: Any) -> Template:
    """The template that `data.template` names: auto, alpaca, none or a .jinja file.

    Raises UserError if auto finds no chat template in the tokenizer, or the file cannot be read or is no template.
    """
    if name == "alpaca":
        return Alpaca()
    if name == "none":
        return Plain()
    if name not in (None, "auto"):
        return ChatTemplate(tokenizer, read_template(str(name)), str(name))
    found = tokenizer.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    if not found:
        raise UserError(f"data.template=auto: the model's tokenizer has no chat template; {_NO_TEMPLATE}")
    return ChatTemplate(tokenizer, found, "the tokenizer's chat template")


def is_template_file(name: str) -> bool:
    """Whether `data.template` names a file."""
    return name.endswith(".jinja")


def read_template(name: str) -> str:
    """The text of a .jinja file, from the current folder. Raises UserError if it cannot be read or does not parse."""
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"data.template={name}: cannot be read ({why}): {path.absolute()}") from error
    return text


def keep_template(name: str | None, tokenizer: Any) -> None:
    """Gives the tokenizer the chat template of the .jinja file that `data.template` names, so that it is saved with an
    adapter. Raises UserError if the file cannot be read."""
    if str(name).endswith(".jinja"):
        tokenizer.chat_template = read_template(str(name))


class ChatTemplate(Template):
    """A chat template in Jinja, run in transformers' sandbox. name: its name in errors."""

    marks_end = True

    def __init__(self, tokenizer: Any, text: str, name: str) -> None:
        self._tokenizer, self._text, self.name = tokenizer, _FIXED_DATE + text, name
        try:
            self._render([{"role": USER, "content": "a"}], False)
        except TemplateSyntaxError as error:
            raise UserError(f"data.template: {name}, line {(error.lineno or 1) - 1}: {error.message}") from error
        except Exception:  # a template may refuse this one message; it is told with a sample
            return

    def turns(self, conversation: Conversation, places: Sequence[int]) -> list[Turn]:
        messages = [{"role": each.role, "content": each.whole} for each in conversation.messages]
        try:
            return [Turn(self._render(messages[:i], True), self._render(messages[: i + 1], False)) for i in places]
        except Exception as error:  # whatever the template does; the user gets one sentence
            why = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, SecurityError):
                why = f"it tries to leave its sandbox: {why}"
            advice = "; it takes no system message: leave data.system out" if _refuses_system(why, conversation) else ""
            raise TemplateError(f"{self.name} fails: {why}{advice}") from error

    def _render(self, messages: list[dict[str, str]], announce: bool) -> str:
        made = self._tokenizer.apply_chat_template(
            messages, chat_template=self._text, tokenize=False, add_generation_prompt=announce
        )
        return str(made)


def _refuses_system(why: str, conversation: Conversation) -> bool:
    return conversation.has_system and "system" in why.lower()


class Alpaca(Template):
    """The prompt of Stanford Alpaca (Taori et al. 2023), with its words for an instruction with and without an input.

    A response begins after a blank, as in OpenFedLLM and FlowerTune.
    """

    marks_end = False
    _HEAD = "Below is an instruction that describes a task"
    _TASK = "Write a response that appropriately completes the request.\n\n"

    def turns(self, conversation: Conversation, places: Sequence[int]) -> list[Turn]:
        asked, response = _one_exchange(conversation, "alpaca")
        if asked.input:
            before = f"{self._HEAD}, paired with an input that provides further context. {self._TASK}"
            about = f"### Input:\n{asked.input}\n\n"
        else:
            before, about = f"{self._HEAD}. {self._TASK}", ""
        before += f"### Instruction:\n{asked.content}\n\n{about}### Response:"
        return [Turn(before, f"{before} {response.content}")]


class Plain(Template):
    """The prompt and the response as they are. Blanks at the end of the prompt go to the response: a tokenizer joins
    a blank with the word behind it."""

    marks_end = False

    def turns(self, conversation: Conversation, places: Sequence[int]) -> list[Turn]:
        asked, response = _one_exchange(conversation, "none")
        prompt = asked.whole
        return [Turn(prompt.rstrip(" "), prompt + response.content)]


def _one_exchange(conversation: Conversation, template: str) -> tuple[Message, Message]:
    messages = conversation.messages
    if [message.role for message in messages] == [USER, ASSISTANT]:
        return messages[0], messages[1]
    what = "a system message" if messages[0].role == SYSTEM else f"{len(messages)} messages"
    raise TemplateError(
        f"template {template} is for one prompt and one response, found {what}; leave data.system out, or use a chat "
        f"template"
    )
