"""The token ids of a conversation, and which of them are learned: by position, never by searching for ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.data.conversations.conversation import Conversation
from fedllm.data.conversations.templates import Template, TemplateError, Turn

Ids = list[int]
Tokenize = Callable[[str], Ids]


@dataclass(frozen=True)
class Marked:
    """Token ids and, for each, whether it is learned; never the first."""

    ids: Ids
    learned: list[bool]

    def cut(self, length: int) -> Marked:
        """The first `length` tokens."""
        return Marked(self.ids[:length], self.learned[:length])


class Marker:
    """Writes conversations as marked tokens.

    learn: response (every turn of the assistant), last or all. The tokens of a prompt are those that the model sees
    when it is asked: the tokens of the text up to the response. What follows has the tokens of the longer text, where
    these begin with the tokens before, and else the tokens of the new part alone. A response is learned up to its
    end-of-turn token, which comes from the template, or is the tokenizer's eos token where the template puts none.
    """

    def __init__(self, tokenizer: Any, template: Template | None, learn: str) -> None:
        self._tokenizer, self._template, self._learn = tokenizer, template, learn
        self._special = frozenset(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def texts(self, conversation: Conversation) -> list[Turn]:
        """The learned responses of a conversation as texts. Raises TemplateError."""
        if conversation.is_text:
            return [Turn("", conversation.messages[0].content)]
        assert self._template is not None, "only plain texts need no template"
        places = conversation.turns if self._learn == "response" else conversation.turns[-1:]
        return self._template.turns(conversation, places)

    def mark(self, conversation: Conversation, turns: Sequence[Turn], tokenize: Tokenize) -> Marked:
        """The tokens of a conversation. turns: see texts. tokenize: gives the ids of a text, without special tokens.

        Raises TemplateError for a template that writes a turn otherwise once another follows, or marks no end of it.
        """
        ids: Ids = []
        learned: list[bool] = []
        text = ""
        for number, turn in enumerate(turns, 1):
            if not turn.before.startswith(text):
                raise TemplateError(
                    f"the template writes the text up to answer {number} otherwise than the earlier answers alone; "
                    f"set data.learn=last"
                )
            if not turn.after.startswith(turn.before):
                raise TemplateError(
                    f"the prompt is no prefix of prompt and answer {number}: the template writes other words before "
                    f"an answer than before it is given (add_generation_prompt)"
                )
            ids = _longer(ids, text, turn.before, tokenize)
            learned += [False] * (len(ids) - len(learned))
            ids = self._answer(ids, turn, number, conversation, tokenize)
            learned += [True] * (len(ids) - len(learned))
            text = turn.after.rstrip()
        if self._learn == "all" or conversation.is_text:
            learned = [True] * len(ids)
        if conversation.is_text or not (self._template and self._template.marks_end):
            first = self._first_tokens()
            ids, learned = first + ids, [self._learn == "all"] * len(first) + learned
        return Marked(ids, [False, *learned[1:]])

    def _answer(self, ids: Ids, turn: Turn, number: int, conversation: Conversation, tokenize: Tokenize) -> Ids:
        """The tokens up to the end of a response. ids: those before it."""
        whole = _longer(ids, turn.before, turn.after, tokenize)
        if conversation.is_text or not (self._template and self._template.marks_end):
            end = self._tokenizer.eos_token_id
            if end is None:
                raise TemplateError(
                    "the tokenizer has no eos token, with which a model ends its answer; set its eos_token"
                )
            return whole if whole[len(ids) :][-1:] == [end] else [*whole, end]
        places = [place for place in range(len(ids), len(whole)) if whole[place] in self._special]
        if not places or self._tokenizer.decode(whole[places[-1] + 1 :]).strip():
            raise TemplateError(
                f"the template puts no end-of-turn token behind answer {number}, so a model would not learn to stop; "
                f"expected one, such as {{{{ eos_token }}}}"
            )
        return whole[: places[-1] + 1]

    def _first_tokens(self) -> Ids:
        """The bos token, if the tokenizer puts one before a text."""
        bos = self._tokenizer.bos_token_id
        return [bos] if bos is not None and self._tokenizer("")["input_ids"][:1] == [bos] else []


def _longer(ids: Ids, text: str, longer: str, tokenize: Tokenize) -> Ids:
    """The ids of `longer`, a text that begins with `text`, whose ids are `ids`; they begin with `ids`."""
    whole = tokenize(longer)
    return whole if whole[: len(ids)] == ids else ids + tokenize(longer[len(text) :])
