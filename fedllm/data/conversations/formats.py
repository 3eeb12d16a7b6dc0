"""Reads conversations from a table, in one of four formats that its columns tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import UserError, cut_name, listed
from fedllm.data.conversations.conversation import ASSISTANT, SYSTEM, TEXT, USER, Conversation, Message
from fedllm.data.conversations.messages import MessageError, as_list, check_order, read_messages
from fedllm.data.tables import Table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

MESSAGES, PROMPT, INSTRUCTION, PLAIN = "messages", "prompt_completion", "instruction", "text"
_SYSTEM_COLUMN = "system"
_INPUTS = ("input", "context")


@dataclass(frozen=True)
class Columns:
    """The columns that hold a format's parts. The parts are roles, or "input", "options" and "answer"."""

    format: str
    of: dict[str, str]

    def __str__(self) -> str:
        return f"{self.format}, columns {', '.join(self.of.values())}"


def find_columns(settings: DataSettings, table: Table) -> Columns:
    """The format of a table and its columns: those that the settings name, else the usual ones.

    Of the formats whose columns are all there, it is the first of: messages, prompt and completion, instruction and
    output, text. Raises UserError if none is, or the one that is asked for is not.
    """
    wanted = [settings.format] if settings.format != "auto" else [MESSAGES, PROMPT, INSTRUCTION, PLAIN]
    for form in wanted:
        columns = _candidate(str(form), settings, table)
        if all(name in table.columns for name in columns.values()) and _uses(columns, settings):
            return Columns(str(form), columns | _extras(str(form), settings, table))
    candidates = [_candidate(str(form), settings, table) for form in wanted]
    fitting = [columns for columns in candidates if _uses(columns, settings)] or candidates
    expected = "; or ".join(", ".join(columns.values()) for columns in fitting)
    named = [f"data.{key}={getattr(settings, key)}" for key in _NAMING if getattr(settings, key) is not None]
    given = " and ".join([f"data.format={settings.format}", *named])
    raise UserError(
        f"{table.source}: its columns are {listed(list(table.columns), 20)}, expected {expected} with {given}"
    )


_NAMING = ("messages", "prompt", "response", "choices", "text")  # keys that name columns


def _candidate(form: str, settings: DataSettings, table: Table) -> dict[str, str]:
    """The columns that a format must have, by their parts."""
    if form == MESSAGES:
        return {MESSAGES: settings.messages or _first(table, "messages", "conversations")}
    if form == PLAIN:
        return {PLAIN: settings.text[0] if settings.text else "text"}
    prompt = settings.prompt or ("prompt" if form == PROMPT else "instruction")
    if settings.choices:
        return {USER: prompt, "options": settings.choices, "answer": str(settings.answer)}
    usual = ("completion", "response") if form == PROMPT else ("output", "response")
    return {USER: prompt, ASSISTANT: settings.response or _first(table, *usual)}


def _first(table: Table, *names: str) -> str:
    return next((name for name in names if name in table.columns), names[0])


def _uses(columns: dict[str, str], settings: DataSettings) -> bool:
    """Whether a format has a part for every column that the settings name."""
    named = [settings.messages, settings.prompt, settings.response, settings.choices, *(settings.text or [])]
    return all(name in columns.values() for name in named if name is not None)


def _extras(form: str, settings: DataSettings, table: Table) -> dict[str, str]:
    """The columns that a format may have."""
    found = {SYSTEM: _SYSTEM_COLUMN} if form in (PROMPT, INSTRUCTION) and _SYSTEM_COLUMN in table.columns else {}
    given = next((name for name in _INPUTS if name in table.columns), None)
    return found | ({"input": given} if form == INSTRUCTION and given else {})


def read_conversations(table: Table, columns: Columns) -> tuple[list[Conversation], list[str]]:
    """The conversation of each row, and notes about what was left out.

    Raises UserError that names the first row that is none, by its number from 1, and how many there are.
    """
    read = {MESSAGES: _of_messages, PLAIN: _of_text}.get(columns.format, _of_pairs)
    found: list[Conversation] = []
    faults: list[tuple[int, str]] = []
    unanswered = 0
    for row, made in enumerate(read(table, columns), 1):
        if isinstance(made, MessageError):
            faults.append((row, str(made)))
        else:
            found.append(made[0])
            unanswered += made[1]
    if faults:
        row, why = faults[0]
        more = f"; {len(faults) - 1:,} more rows are wrong" if len(faults) > 1 else ""
        raise UserError(
            f"{table.source}, {table.row_name(row)}, {_said(columns)}: {why}{more}; correct or drop these rows"
        )
    note = f"{table.source}: in {unanswered:,} of {len(found):,} rows the last message is the user's and is left out"
    return found, [note] if unanswered else []


def _said(columns: Columns) -> str:
    parts = [name for part, name in columns.of.items() if part in (MESSAGES, PLAIN, ASSISTANT, "options", "answer")]
    return f"column{'s' if len(parts) > 1 else ''} {listed(parts)}"


_Answer = tuple[str, tuple[str, ...], int | None]
_Made = Iterator[tuple[Conversation, bool] | MessageError]


def _of_messages(table: Table, columns: Columns) -> _Made:
    for cell in table.column(columns.of[MESSAGES], "data.messages"):
        try:
            messages, unanswered = read_messages(cell)
            yield Conversation(messages), unanswered
        except MessageError as error:
            yield error


def _of_text(table: Table, columns: Columns) -> _Made:
    for text in table.texts(columns.of[PLAIN]):
        yield (Conversation((Message(TEXT, text),)), False) if text.strip() else MessageError("the text is empty")


def _of_pairs(table: Table, columns: Columns) -> _Made:
    """A prompt and a response; in format prompt_completion both may be lists of messages."""
    names = columns.of
    prompts = table.column(names[USER], "data.prompt")
    if columns.format == PROMPT and prompts and isinstance(prompts[0], list) and ASSISTANT in names:
        yield from _of_lists(prompts, table.column(names[ASSISTANT], "data.response"))
        return
    prompts = table.texts(names[USER], "data.prompt")
    inputs = _optional(table, names.get("input"))
    systems = _optional(table, names.get(SYSTEM))
    answers = _answers(table, names)
    for row, prompt in enumerate(prompts):
        try:
            yield _pair(Message(USER, prompt, inputs[row]), systems[row], *answers(row)), False
        except MessageError as error:
            yield error


def _answers(table: Table, names: dict[str, str]) -> Callable[[int], _Answer]:
    """A function that gives the response of a row from 0, and where it is a choice, the options and its place."""
    if "options" not in names:
        responses = table.texts(names[ASSISTANT], "data.response")
        return lambda row: (responses[row], (), None)
    options, right = table.column(names["options"], "data.choices"), table.column(names["answer"], "data.answer")
    return lambda row: choose(options[row], right[row])


def _pair(asked: Message, system: str, response: str, options: tuple[str, ...], answer: int | None) -> Conversation:
    first = (Message(SYSTEM, system),) if system else ()
    if not response.strip():
        raise MessageError("the response is empty")
    return Conversation((*first, asked, Message(ASSISTANT, response)), options, answer)


def _of_lists(prompts: Sequence[Any], responses: Sequence[Any]) -> _Made:
    for prompt, response in zip(prompts, responses, strict=True):
        try:
            if not isinstance(prompt, list) or not isinstance(response, list):
                raise MessageError("found text in one of prompt and response and messages in others, expected one form")
            messages, _ = read_messages([*prompt, *response])
            check_order(messages)
            yield Conversation(messages), False
        except MessageError as error:
            yield error


def _optional(table: Table, name: str | None) -> list[str]:
    """A column whose missing values are empty texts; empty texts where there is no such column."""
    if name is None:
        return [""] * len(table)
    filled = ["" if value is None else value for value in table.columns[name]]
    return Table(table.source, {name: filled}).texts(name, "data.format")


def choose(options: Any, answer: Any) -> _Answer:
    """The right option, all options, and the place of the right one. Raises MessageError for options that are not two
    or more different texts, and an answer that is none of them."""
    if isinstance(options, str):
        options = as_list(options)
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise MessageError("the options are no list of texts")
    if len(options) < 2:
        raise MessageError(f"found {len(options)} option{'s' if len(options) != 1 else ''}, expected two or more")
    if len(set(options)) < len(options):
        raise MessageError("an option is there twice, expected different ones")
    if isinstance(answer, str) and answer in options:
        place = options.index(answer)
    elif type(answer) is int and 0 <= answer < len(options):
        place = answer
    else:
        told = f"the number {cut_name(answer)}" if type(answer) is int else "a value that is none of the options"
        raise MessageError(f"the answer is {told}, expected an option's text or its place, 0 to {len(options) - 1}")
    return options[place], tuple(options), place
