"""The tokens that a trained model is asked with: those of a sample in training, up to its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import ASSISTANT, TEXT, Conversation, Message
from fedllm.data.conversations.masks import Ids, Marker
from fedllm.data.conversations.templates import ChatTemplate, TemplateError, find_template

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings


class Prompter:
    """Writes messages by the template and the system message of the settings.

    texts: whether prompts are plain texts that the model continues, which have no template. remembers: whether earlier
    turns can be part of a prompt. Raises UserError for a template that does not exist.
    """

    def __init__(self, tokenizer: Any, settings: DataSettings, *, texts: bool = False) -> None:
        template = None if texts else find_template(settings.template, tokenizer)
        self.remembers = isinstance(template, ChatTemplate)
        self._tokenizer, self._system, self._texts = tokenizer, settings.system, texts
        self._marker = Marker(tokenizer, template, "last")

    def ids(self, messages: Sequence[Message]) -> Ids:
        """The ids of a prompt whose last message is the user's, or is a text.

        Raises UserError for messages that the template has no place for.
        """
        try:
            return self._text_ids(messages[0]) if self._texts else self._prompt_ids(messages)
        except TemplateError as error:
            raise UserError(f"data.template: {error}") from error

    def _text_ids(self, message: Message) -> Ids:
        conversation = Conversation((Message(TEXT, message.content),))
        marked = self._marker.mark(conversation, self._marker.texts(conversation), self._tokens)
        return marked.ids[:-1]  # without the eos token

    def _prompt_ids(self, messages: Sequence[Message]) -> Ids:
        answered = Conversation((*messages, Message(ASSISTANT, "a"))).with_system(self._system)
        marked = self._marker.mark(answered, self._marker.texts(answered), self._tokens)
        return marked.ids[: marked.learned.index(True)]

    def _tokens(self, text: str) -> Ids:
        found: Ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return found
