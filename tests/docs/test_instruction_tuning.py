"""The recipe and the samples of the guide to instruction tuning."""

from __future__ import annotations

import json
import re
from pathlib import Path

from repository import REPO

from fedllm import load_recipe
from fedllm.data.conversations.formats import find_columns, read_conversations
from fedllm.data.settings import DataSettings
from fedllm.data.tables import Table

PAGE = (REPO / "docs/guides/instruction_tuning.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


def test_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "chats.yaml").write_text(block("yaml"))
    assert load_recipe(tmp_path / "chats.yaml").data.task == "causal_lm"


def test_each_sample_has_the_format_of_its_row_of_the_table() -> None:
    settings = DataSettings(train="chats.jsonl", task="causal_lm")
    formats = []
    for line in block("json").splitlines():
        table = Table("chats.jsonl", {name: [value] for name, value in json.loads(line).items()})
        columns = find_columns(settings, table)
        assert len(read_conversations(table, columns)[0]) == 1
        formats.append(columns.format)
    assert formats == re.findall(r"^\| `(messages|prompt_completion|instruction|text)` \|", PAGE, flags=re.MULTILINE)


def test_the_recipes_that_it_names_are_there() -> None:
    named = re.findall(r"`(instruct_\w+)`", PAGE)
    assert {path.stem for path in (REPO / "recipes").glob("instruct_*.yaml")} == set(named)
