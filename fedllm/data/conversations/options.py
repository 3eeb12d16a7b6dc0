"""The options of multiple-choice questions as samples, so that a model's choice is the likeliest one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import Conversation
from fedllm.data.conversations.encoding import Encoder, telling, tokens_of
from fedllm.data.conversations.masks import Marked
from fedllm.data.conversations.too_long import fit
from fedllm.data.tokenization import Tokens

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings
    from fedllm.data.split import Split


@dataclass(frozen=True)
class Options:
    """n options of m questions.

    tokens: a sample per option, whose learned tokens are those of the option, without the end of the turn. question,
    int64 [n]: the question of each, from 0. right, bool [n]. bytes, float [n]: of each option as UTF-8.
    """

    tokens: Tokens
    question: torch.Tensor
    right: torch.Tensor
    bytes: torch.Tensor

    def accuracy(self, likelihoods: torch.Tensor) -> float:
        """The share of questions of which the right option has the highest value; the first one, where several have.

        likelihoods [n]: one value per option. A question with a value that is not finite counts as wrong.
        """
        right = 0
        for question in range(int(self.question[-1]) + 1):
            own = self.question == question
            values = likelihoods[own]
            right += bool(values.isfinite().all() and self.right[own][int(values.argmax())])
        return right / (int(self.question[-1]) + 1)


def encode_options(split: Split, tokenizer: Any, settings: DataSettings, max_length: int) -> Options | None:
    """The options of all conversations that have some; None if none has.

    A prompt that is too long loses its beginning, whatever `too_long` says, so that the options of a question are all
    scored. Raises UserError for an option that alone is longer than `max_length` tokens.
    """
    conversations = split.conversations or []
    rows = [row for row, conversation in enumerate(conversations) if conversation.options]
    if not rows:
        return None
    encoder = Encoder(tokenizer, replace(settings, learn="last"), [conversations[row] for row in rows])
    found: list[Marked] = []
    question, right, sizes = [], [], []
    for number, row in enumerate(rows):
        asked = conversations[row]
        for place, option in enumerate(asked.options):
            found.append(telling(split, row, _marked, encoder, asked.with_system(settings.system), option, max_length))
            question.append(number)
            right.append(place == asked.answer)
            sizes.append(float(len(option.encode())))
    tokens = tokens_of(found, torch.zeros(len(found), dtype=torch.long))
    return Options(tokens, torch.tensor(question), torch.tensor(right), torch.tensor(sizes))


def _marked(encoder: Encoder, asked: Conversation, option: str, max_length: int) -> Marked:
    last = replace(asked.messages[-1], content=option)
    answered = replace(asked, messages=(*asked.messages[:-1], last))
    whole = fit("cut_prompt", encoder.encode(answered), answered, encoder.encode, max_length)
    if whole is None:
        raise UserError(
            f"data.max_length={max_length}: an option of data.choices with the template is longer than that; raise it"
        )
    end = len(whole.ids) - 1 - whole.learned[::-1].index(True)
    return Marked(whole.ids, [learned and place != end for place, learned in enumerate(whole.learned)])
