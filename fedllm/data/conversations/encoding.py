"""Tokens of a split of conversations, with the learned ones marked."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import Conversation
from fedllm.data.conversations.masks import Ids, Marked, Marker
from fedllm.data.conversations.templates import TemplateError, find_template
from fedllm.data.conversations.too_long import fit
from fedllm.data.tokenization import BATCH, Tokens

if TYPE_CHECKING:
    from fedllm.data.loading import Split
    from fedllm.data.settings import DataSettings


def encode_conversations(
    split: Split, tokenizer: Any, settings: DataSettings, max_length: int, progress: ProgressCallback | None = None
) -> Tokens:
    """The n conversations of a split as tokens, by the template, `learn` and `too_long` of the settings.

    A conversation that is left out has no tokens; `Tokens.sizes` of it is 0. `Tokens.notes` says how many were cut and
    how many left out. Raises UserError that names the first row that the template cannot write, and where no sample
    is left.
    """
    if max_length < 2:
        raise UserError(f"data.max_length={max_length}: expected at least 2 tokens, one to read and one to learn")
    assert split.conversations is not None, "a causal language model learns conversations"
    encoder = Encoder(tokenizer, settings, split.conversations)
    found: list[Marked | None] = []
    cut = 0
    for start in range(0, len(split), BATCH):
        rows = range(start, min(start + BATCH, len(split)))
        for row, (conversation, marked) in zip(rows, encoder.batch(split, rows), strict=True):
            fitted = _fitted(encoder, settings, split, row, conversation, marked, max_length)
            cut += fitted is not None and fitted is not marked
            found.append(fitted)
        if progress:
            progress("tokenizing", rows.stop, len(split))
    _require_some(found, settings, max_length)
    plain = any(conversation.is_text for conversation in split.conversations)
    notes = _notes(found, cut, str(settings.too_long), plain, max_length)
    return tokens_of([marked or Marked([], []) for marked in found], torch.from_numpy(split.labels.copy()), notes)


class Encoder:
    """Writes conversations as marked tokens, with the system message that the settings give to those without one.

    Raises UserError for a template that does not exist, and conversations that need a template the tokenizer lacks.
    """

    def __init__(self, tokenizer: Any, settings: DataSettings, conversations: Iterable[Conversation]) -> None:
        texts = {conversation.is_text for conversation in conversations}
        if True in texts and settings.template not in ("auto", "none"):
            raise UserError(
                f"data.template={settings.template}: the samples are plain texts, without turns; leave it out"
            )
        template = find_template(settings.template, tokenizer) if False in texts else None
        self._tokenizer, self._system = tokenizer, settings.system
        self._marker = Marker(tokenizer, template, str(settings.learn))

    def batch(self, split: Split, rows: range) -> list[tuple[Conversation, Marked]]:
        """The conversations of some rows and their tokens; all texts are tokenized in one call."""
        assert split.conversations is not None
        conversations = [split.conversations[row].with_system(self._system) for row in rows]
        turns = [telling(split, row, self._marker.texts, each) for row, each in zip(rows, conversations, strict=True)]
        texts = list({text: None for turn in chain(*turns) for text in (turn.before, turn.after)})
        known = dict(zip(texts, self._ids(texts), strict=True))

        def tokenize(text: str) -> Ids:
            return known[text] if text in known else self._ids([text])[0]

        every = zip(rows, conversations, turns, strict=True)
        return [(each, telling(split, row, self._marker.mark, each, its, tokenize)) for row, each, its in every]

    def encode(self, conversation: Conversation) -> Marked:
        """The tokens of one conversation, which has its system message. Raises TemplateError."""
        return self._marker.mark(conversation, self._marker.texts(conversation), lambda text: self._ids([text])[0])

    def _ids(self, texts: list[str]) -> list[Ids]:
        found: list[Ids] = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return found


def telling(split: Split, row: int, work: Any, *arguments: Any) -> Any:
    """work(*arguments); a TemplateError becomes a UserError that names the row in the split's file."""
    try:
        return work(*arguments)
    except TemplateError as error:
        number = row + 1 if split.rows is None else int(split.rows[row])
        raise UserError(f"data.template: row {number}: {error}") from error


def _fitted(
    encoder: Encoder,
    settings: DataSettings,
    split: Split,
    row: int,
    conversation: Conversation,
    marked: Marked,
    max_length: int,
) -> Marked | None:
    rule = str(settings.too_long)
    fitted: Marked | None = telling(split, row, fit, rule, marked, conversation, encoder.encode, max_length)
    return fitted


def _require_some(found: list[Marked | None], settings: DataSettings, max_length: int) -> None:
    if found and not any(found):
        raise UserError(
            f"data.max_length={max_length}: with too_long {settings.too_long}, none of {len(found):,} samples has a "
            f"learned token within it; raise it"
        )


def _notes(found: list[Marked | None], cut: int, rule: str, plain: bool, max_length: int) -> tuple[str, ...]:
    """A line about what was too long. plain: whether the samples are plain texts, which are cut at their end."""
    dropped = found.count(None)
    if not cut + dropped:
        return ()
    part = "the end" if plain or rule == "cut_response" else "the beginning of the prompt"
    what = "" if rule == "drop" else f"{part} was cut in {cut:,}, "
    return (
        f"{cut + dropped:,} of {len(found):,} samples are longer than {max_length} tokens: {what}{dropped:,} were left "
        f"out (data.too_long)",
    )


def tokens_of(rows: list[Marked], targets: torch.Tensor, notes: tuple[str, ...] = ()) -> Tokens:
    """The tokens of n marked samples, end to end. targets [n], notes: see Tokens."""
    lengths = [len(marked.ids) for marked in rows]
    total = sum(lengths)
    return Tokens(
        input_ids=torch.from_numpy(np.fromiter(chain.from_iterable(marked.ids for marked in rows), np.int32, total)),
        token_type_ids=None,
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])),
        targets=targets,
        learned=torch.from_numpy(np.fromiter(chain.from_iterable(marked.learned for marked in rows), np.bool_, total)),
        notes=notes,
    )
