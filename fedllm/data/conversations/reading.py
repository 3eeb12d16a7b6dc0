"""Reads the splits of a data set of conversations from its tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedllm.data.conversations.formats import Columns, find_columns, read_conversations
from fedllm.data.conversations.shell_commands import NAME, OTHERS, TRAIN, read_shell_commands
from fedllm.data.groups import column_values, group_ids, in_order, value_name
from fedllm.data.row_choice import csv_form
from fedllm.data.split import Split
from fedllm.data.tables import Table, read_table

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

# Data sets known by name: split name -> function that reads the split.
KNOWN_CONVERSATIONS: dict[str, dict[str, Callable[[], Table]]] = {
    NAME: {split: partial(read_shell_commands, split) for split in (TRAIN, OTHERS)},
}
# Columns that a CSV gives as text, whatever is in them.
TEXT_COLUMNS = (
    "prompt", "completion", "instruction", "input", "context", "output", "response", "text", "messages",
    "conversations", "system",
)  # fmt: skip


def named_columns(settings: DataSettings) -> tuple[str, ...]:
    """The columns of text that the settings name."""
    named = (settings.prompt, settings.response, settings.messages, settings.choices, *(settings.text or ()))
    return tuple(name for name in named if name is not None)


def read_conversation_splits(
    settings: DataSettings, tables: dict[str, Table], group_column: str | None
) -> tuple[dict[str, Split], tuple[str, ...], list[str]]:
    """The splits of the tables by role, the names of their groups, and notes for the user.

    group_column: the column whose values in the training split are the groups; None for one group without a name. A
    validation sample with another value, or without that column, has group -1.
    """
    notes: list[str] = []
    splits: dict[str, Split] = {}
    for role, table in tables.items():
        columns = find_columns(settings, table)
        splits[role], told = _read_split(table, columns)
        if settings.format == "auto" and role == "train":
            notes.append(f"{table.source}: read as {columns}")
        if columns.format == "text" and role == "train":
            notes.append("the samples are plain texts: every token is learned, and an eos token at the end")
        notes += told
    if group_column is None:
        return splits, (), notes
    values = column_values(splits["train"], group_column, settings.name or str(settings.train))
    names = in_order(list(map(value_name, values)))
    return {role: _grouped(split, group_column, names) for role, split in splits.items()}, tuple(names), notes


def read_conversation_file(settings: DataSettings, path: Path) -> tuple[Split, list[str]]:
    """The conversations of a file, in the format and the columns of the settings, and notes for the user.

    Raises UserError as read_table and read_conversations do.
    """
    table = read_table(path, text=TEXT_COLUMNS + named_columns(settings), form=csv_form(settings))
    split, notes = _read_split(table, find_columns(settings, table))
    return split, [*table.notes, *notes]


def _read_split(table: Table, columns: Columns) -> tuple[Split, list[str]]:
    conversations, notes = read_conversations(table, columns)
    rows = np.arange(1, len(table) + 1)
    others = table.without(*columns.of.values())
    return Split([], np.zeros(len(rows), np.int64), others, rows, conversations), notes


def _grouped(split: Split, column: str, names: list[str]) -> Split:
    values = split.columns.get(column, [None] * len(split))
    return Split(split.texts, group_ids(values, names), split.columns, split.rows, split.conversations)
