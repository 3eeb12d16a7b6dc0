"""Prompts for a trained model, from the rows of a file: what a sample has before its last response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import UserError, listed
from fedllm.data.conversations.conversation import SYSTEM, USER, Message
from fedllm.data.conversations.messages import MessageError, read_question
from fedllm.data.row_stream import Chunk

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

_INPUTS = ("input", "context")


@dataclass(frozen=True)
class Questions:
    """Where the prompts of a file are. format: messages, prompt_completion, instruction or text. column: of the prompt,
    the messages or the text. input, system: columns that belong to it, "" where there are none."""

    format: str
    column: str
    input: str = ""
    system: str = ""

    def of(self, chunk: Chunk) -> list[list[Message]]:
        """The messages of each row; the last is the user's, or a text.

        Raises UserError that names the first row that has none.
        """
        if self.format == "messages":
            numbered = enumerate(chunk.records, chunk.first)
            return [self._read(record, f"{chunk.source}, row {row}") for row, record in numbered]
        texts = chunk.texts(self.column)
        return [self._asked(text, record) for text, record in zip(texts, chunk.records, strict=True)]

    def _read(self, record: Mapping[str, Any], where: str) -> list[Message]:
        try:
            return list(read_question(record.get(self.column)))
        except MessageError as error:
            raise UserError(f"{where}, column {self.column}: {error}; correct or drop this row") from error

    def _asked(self, text: str, record: Mapping[str, Any]) -> list[Message]:
        def more(column: str) -> str:
            return str(record.get(column) or "") if column else ""

        first = [Message(SYSTEM, more(self.system))] if more(self.system) else []
        return [*first, Message(USER, text, more(self.input))]


def find_questions(settings: DataSettings, file: Path, names: Sequence[str], given: Sequence[str] | None) -> Questions:
    """The prompts of a file with these columns: in the column `given`, one that the settings name, or a usual one.

    Raises UserError for a file that has none of them.
    """
    if given and len(given) != 1:
        raise UserError(f"--text: found {len(given)} columns ({', '.join(given)}), expected the one of the prompts")
    wanted = {
        "messages": [settings.messages or "messages", "conversations"],
        "prompt_completion": [settings.prompt or "prompt"],
        "instruction": [settings.prompt or "instruction"],
        "text": [settings.text[0] if settings.text else "text"],
    }
    if settings.format != "auto":
        wanted = {str(settings.format): wanted[str(settings.format)]}
    if given:
        wanted = {next((form for form, columns in wanted.items() if given[0] in columns), [*wanted][-1]): list(given)}
    for form, columns in wanted.items():
        if column := next((name for name in columns if name in names), None):
            asked = form in ("prompt_completion", "instruction")
            system = "system" if asked and "system" in names else ""
            about = next((name for name in _INPUTS if name in names), "") if form == "instruction" else ""
            return Questions(form, column, about, system)
    expected = ", ".join(dict.fromkeys(columns[0] for columns in wanted.values()))
    raise UserError(
        f"{file}: its columns are {listed(list(names), 20)}, expected one of {expected}; or name it with --text"
    )
