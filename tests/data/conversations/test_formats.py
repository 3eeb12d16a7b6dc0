"""Conversations read from tables: the four formats, and what is wrong with a row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from fedllm.common.errors import UserError
from fedllm.data.conversations.conversation import Conversation, Message
from fedllm.data.conversations.formats import find_columns, read_conversations
from fedllm.data.conversations.reading import read_conversation_file
from fedllm.data.loading import load_dataset
from fedllm.data.settings import DataSettings
from fedllm.data.tables import Table


def read(columns: dict[str, list[Any]], **keys: Any) -> list[Conversation]:
    settings, table = DataSettings(train="own.jsonl", task="causal_lm", **keys), Table("own.jsonl", columns)
    return read_conversations(table, find_columns(settings, table))[0]


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.whole) for message in conversation.messages]


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


CHAT = turns(("system", "s"), ("user", "u"), ("assistant", "a"))
EXPECTED = [("system", "s"), ("user", "u"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"messages": [CHAT]}, EXPECTED),
        ({"messages": [json.dumps(CHAT)]}, EXPECTED),
        ({"conversations": [[{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]]}, EXPECTED[1:]),
        ({"prompt": ["u"], "completion": ["a"], "tool": ["git"]}, EXPECTED[1:]),
        ({"prompt": ["u"], "completion": ["a"], "system": ["s"]}, EXPECTED),
        ({"prompt": ["u"], "completion": ["a"], "system": [None]}, EXPECTED[1:]),
        ({"prompt": [CHAT[:2]], "completion": [CHAT[2:]]}, EXPECTED),
        ({"instruction": ["u"], "input": [""], "output": ["a"], "text": ["u a"]}, EXPECTED[1:]),
        ({"instruction": ["u"], "input": ["i"], "output": ["a"]}, [("user", "u\n\ni"), ("assistant", "a")]),
        ({"instruction": ["u"], "context": ["i"], "response": ["a"]}, [("user", "u\n\ni"), ("assistant", "a")]),
        ({"text": ["t"], "site": [1]}, [("text", "t")]),
    ],
)
def test_the_format_is_told_by_the_columns(columns: dict[str, list[Any]], expected: list[tuple[str, str]]) -> None:
    assert said(read(columns)[0]) == expected


def test_columns_with_other_names() -> None:
    columns = {"question": ["q"], "reply": ["r"], "text": ["t"], "prompt": ["p"], "completion": ["c"]}
    assert said(read(columns, prompt="question", response="reply")[0]) == [("user", "q"), ("assistant", "r")]
    assert said(read(columns, text=["text"])[0]) == [("text", "t")]
    assert said(read(columns, format="text", text=["question"])[0]) == [("text", "q")]
    assert said(read({"talk": [CHAT]}, messages="talk")[0]) == EXPECTED
    asked = read({"do": ["u"], "input": ["i"], "output": ["a"]}, format="instruction", prompt="do")[0]
    assert asked.messages[0] == Message("user", "u", "i")


@pytest.mark.parametrize(
    ("columns", "keys", "expected"),
    [
        (
            {"question": [""]},
            {},
            "its columns are 'question', expected messages; or prompt, completion; or instruction",
        ),
        ({"text": ["t"]}, {"prompt": "x"}, "expected x, completion; or x, output with .* and data.prompt=x"),
        ({"messages": ["t"]}, {"choices": "x"}, "expected prompt, x, answer; or instruction, x, answer with"),
        ({"prompt": ["t"], "text": [""]}, {"format": "messages"}, "expected messages with data.format=messages"),
        (
            {"messages": [[]], "x": [""]},
            {"format": "messages", "prompt": "x"},
            "data.format=messages and data.prompt=x",
        ),
    ],
)
def test_columns_that_no_format_has(columns: dict[str, list[Any]], keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=rf"^own.jsonl: .*{expected}"):
        read(columns, **keys)


SECRET = "my secret"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (turns(("user", SECRET), ("tool", "x"), ("assistant", "a")), "message 2 is of role 'tool': tool calls are not"),
        (turns(("user", SECRET), ("robot", "x")), "message 2: found role 'robot', expected system, user or assistant"),
        (turns(("assistant", SECRET), ("user", "x")), "message 1 is of role 'assistant', expected 'user'"),
        (
            turns(("user", SECRET), ("user", "x"), ("assistant", "a")),
            "message 2 is of role 'user', expected 'assistant'",
        ),
        (
            turns(("user", SECRET), ("assistant", "a"), ("system", "s")),
            "message 3 is of role 'system', expected 'user'",
        ),
        (turns(("user", SECRET)), "found no message of role 'assistant'"),
        (turns(("system", SECRET)), "found no message of role 'assistant'"),
        (turns(("user", SECRET), ("assistant", " \n")), "message 2: the assistant's answer is empty"),
        (turns(("user", SECRET), ("assistant", None)), "message 2 has no 'content'"),
        (
            turns(("user", [{"type": "image", "url": SECRET}]), ("assistant", "a")),
            "message 1: found content of type list, .*images",
        ),
        (
            [*turns(("user", SECRET)), {"role": "assistant", "tool_calls": [1]}],
            "message 2 has 'tool_calls': .*not supp",
        ),
        ([{"role": "user", "content": SECRET, "weight": 0}], "message 1 has 'weight': .*data.learn"),
        ([SECRET], "message 1 is of type str, expected an object"),
        (SECRET, "found text, expected a list"),
        ({"role": "user"}, "found a value of type dict, expected a list of messages"),
        ([], "found no message"),
        (turns(("user", "\ud800"), ("assistant", "a")), "message 1: found half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_named_and_its_text_is_not_shown(cell: Any, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^own.jsonl, row 2, column 'messages': {expected}") as caught:
        read({"messages": [CHAT, cell, CHAT]})
    assert SECRET not in str(caught.value)


def test_the_number_of_wrong_rows_is_told() -> None:
    with pytest.raises(UserError, match=r"row 1, column 'completion': the response is empty; 2 more rows are wrong"):
        read({"prompt": ["a", "b", "c", "d"], "completion": ["", "x", " ", "\n"]})
    with pytest.raises(UserError, match=r"row 2, column 'text': the text is empty"):
        read({"text": ["a", " "]})
    with pytest.raises(UserError, match=r"column 'completion': 1 of 2 rows has no value, the first is row 2"):
        read({"prompt": ["a", "b"], "completion": ["x", None]})
    with pytest.raises(UserError, match=r"row 2, column 'text': found a value of type float"):
        read({"text": ["a", float("nan")]})
    with pytest.raises(UserError, match=r"row 2, .*found text in one of prompt and response"):
        read({"prompt": [CHAT[:2], "b"], "completion": [CHAT[2:], "x"]})


def test_a_last_question_without_an_answer_is_left_out_and_counted() -> None:
    table = Table("own.jsonl", {"messages": [[*CHAT, *turns(("user", "more?"))], CHAT]})
    found, notes = read_conversations(table, find_columns(DataSettings(train="x", task="causal_lm"), table))
    assert [said(each) for each in found] == [EXPECTED, EXPECTED]
    assert notes == ["own.jsonl: in 1 of 2 rows the last message is the user's and is left out"]


# Choices

KEYS = {"prompt": "question", "choices": "options"}


@pytest.mark.parametrize("answer", [1, "no"])
def test_a_choice_is_answered_by_its_right_option(answer: Any) -> None:
    found = read({"question": ["q"], "options": [["yes", "no", "so"]], "answer": [answer]}, **KEYS)[0]
    assert said(found) == [("user", "q"), ("assistant", "no")]
    assert (found.options, found.answer) == (("yes", "no", "so"), 1)
    assert read({"question": ["q"], "options": ['["yes", "no", "so"]'], "answer": [answer]}, **KEYS)[0] == found


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        (["yes", "no"], "maybe", "the answer is a value that is none of the options"),
        (["yes", "no"], 2, "the answer is the number 2, expected .* 0 to 1"),
        (["yes", "yes"], 0, "an option is there twice"),
        (["yes"], 0, "found 1 option, expected two or more"),
        ("yes or no", 0, "found text, expected a list"),
        ([1, 2], 0, "the options are no list of texts"),
    ],
)
def test_a_choice_that_is_none(options: Any, answer: Any, expected: str) -> None:
    with pytest.raises(UserError, match=rf"row 1, columns 'options', 'answer': {expected}"):
        read({"question": ["q"], "options": [options], "answer": [answer]}, **KEYS)


# Files


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_each_kind_of_file_gives_the_same_conversations(tmp_path: Path, suffix: str) -> None:
    """A CSV's prompts stay text, whatever they look like."""
    path = tmp_path / f"own{suffix}"
    rows = [{"prompt": f"00{number}", "completion": "NA", "site": f"s{number % 2}"} for number in range(6)]
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    found = load_dataset(DataSettings(train=str(path), task="causal_lm", holdout=0.5), group_column="site")
    both = [*found.train.conversations, *found.validation.conversations]
    assert sorted(each.messages[0].content for each in both) == [f"00{number}" for number in range(6)]
    assert {each.messages[1].content for each in both} == {"NA"}
    assert found.groups == ("s0", "s1")
    assert f"{path}: read as prompt_completion, columns prompt, completion" in found.notes


def test_messages_in_parquet_have_null_keys(tmp_path: Path) -> None:
    rows = [{"messages": [{**each, "tool_calls": None, "name": None} for each in CHAT]}] * 2
    pa.parquet.write_table(
        pa.Table.from_pylist(rows, pa.schema([("messages", pa.list_(pa.struct(
            [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string()), ("name", pa.string())]
        )))])), tmp_path / "own.parquet",
    )  # fmt: skip
    path = str(tmp_path / "own.parquet")
    pa.parquet.write_table(pa.Table.from_pylist([{"messages": CHAT}]), tmp_path / "v.parquet")
    found = load_dataset(DataSettings(train=path, validation=str(tmp_path / "v.parquet"), task="causal_lm"))
    assert [said(each) for each in found.train.conversations] == [EXPECTED, EXPECTED]


def test_a_file_to_evaluate_on_is_read_by_the_keys_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "more.csv"
    path.write_text("ask,reply,tool\n007,NA,git\nb,c,tar\n")
    settings = DataSettings(name="shell_commands", task="causal_lm", prompt="ask", response="reply")
    split, notes = read_conversation_file(settings, path)
    assert [said(each) for each in split.conversations] == [
        [("user", "007"), ("assistant", "NA")],
        [("user", "b"), ("assistant", "c")],
    ]
    assert split.columns == {"tool": ["git", "tar"]}
    assert (len(split), split.rows.tolist(), notes) == (2, [1, 2], [])
