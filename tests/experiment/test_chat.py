"""fedllm chat and predict for runs of causal language models."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from causal_checkpoints import run_causal

from fedllm import UserError
from fedllm.cli.commands import main
from fedllm.common.console import console
from fedllm.data.conversations.conversation import ASSISTANT, SYSTEM, USER, Message
from fedllm.experiment.answerer import Answerer
from fedllm.experiment.inference import Inference
from fedllm.experiment.trained import load_trained

SHARED = [("human", "red"), ("gpt", "a"), ("human", "cat")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_causal(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def answerer(run: Path) -> Answerer:
    return Answerer(Inference(load_trained(run)))


@pytest.fixture(autouse=True)
def _same_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stderr", console.stderr)


def answer(answerer: Answerer, *contents: str) -> str:
    roles = [USER, ASSISTANT] * len(contents)
    messages = [Message(role, content) for role, content in zip(roles, contents, strict=False)]
    (found,) = answerer.answers([messages], 5)
    return found


def chat(run: Path, said: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", str(run), "--new-tokens", "5", *words])


@pytest.mark.slow
def test_a_chat_from_a_pipe_is_one_conversation(
    run: Path, answerer: Answerer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(answerer, "the tree")
    second = answer(answerer, "the tree", first, "the tree")
    assert len({first, second, ""}) == 3
    assert chat(run, "the tree\n\nthe tree\n/new\nthe tree\n/quit\nthe mat\n", monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [first, second, first]
    assert chat(run, "the tree", monkeypatch, "--temperature", "50") == 0
    assert capsys.readouterr().out.splitlines() != [first]


def test_a_conversation_longer_than_the_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(run, "red cat " * 40, monkeypatch) == 2
    assert "tokens long, more than the model has positions for" in capsys.readouterr().err


def test_chat_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([run, "--temperature", "-1"], "--temperature=-1: expected a number, 0 or more"),
        ([run, "--new-tokens", "0"], "--new-tokens=0: expected at least 1"),
        ([run, "--round", "9"], "has no checkpoint of round 9"),
        ([tmp_path / "none"], "no such folder"),
    ):
        assert main(["chat", *map(str, words)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "red cat", "system": "not very big"},
        {"instruction": "red", "input": "cat"},
        {"messages": [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": "the mat"}]},
        {"conversations": [{"from": who, "value": said} for who, said in SHARED]},
    ],
    ids=["prompt", "instruction", "messages", "sharegpt"],
)
def test_predict_writes_the_greedy_answers(
    run: Path, answerer: Answerer, row: dict[str, object], tmp_path: Path
) -> None:
    rows = [row, {**row, "more": 1}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "answered.jsonl"
    assert main(["predict", str(run), str(tmp_path / "asked.jsonl"), "--out", str(out), "--new-tokens", "5"]) == 0
    asked = {
        "prompt": [Message(SYSTEM, "not very big"), Message(USER, "red cat")],
        "instruction": [Message(USER, "red", "cat")],
        "messages": [Message(USER, "red cat")],
        "conversations": [Message(USER, "red"), Message(ASSISTANT, "a"), Message(USER, "cat")],
    }[next(iter(row))]
    (expected,) = answerer.answers([asked], 5)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found == [{**each, "prediction": expected} for each in rows]


def test_predict_from_a_column_of_a_csv(run: Path, answerer: Answerer, tmp_path: Path) -> None:
    (tmp_path / "asked.csv").write_text("question,number\nthe tree,007\nbig dog sat,8\n")
    words = [str(run), str(tmp_path / "asked.csv"), "--out", str(tmp_path / "out.csv"), "--text", "question"]
    assert main(["predict", *words, "--new-tokens", "5"]) == 0
    expected = [answer(answerer, "the tree"), answer(answerer, "big dog sat")]
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines == [
        "question,number,prediction", f"the tree,007,{expected[0]}", f"big dog sat,8,{expected[1]}"
    ]  # fmt: skip
    assert all(expected)


def test_predict_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "asked.jsonl"
    for rows, words, message in (
        ([{"prompt": "a"}], ["--probabilities"], "--probabilities: the run trained a language model"),
        ([{"prompt": "a"}, {"prompt": None}], [], "row 2, column 'prompt': found no value"),
        ([{"question": "a"}], [], "its columns are 'question', expected one of messages, prompt, instruction, text"),
        ([{"prompt": "a"}], ["--new-tokens", "0"], "--new-tokens=0: expected at least 1"),
        ([{"prompt": "a"}], ["--text", "a", "--text", "b"], "expected the one of the prompts"),
        ([{"messages": [{"role": "system", "content": "secret"}]}], [], "row 1, column messages: found no message of"),
        ([{"messages": [{"role": "tool", "content": "secret"}]}], [], "row 1, column messages: message 1 is of role"),
    ):
        asked.write_text("\n".join(map(json.dumps, rows)))
        assert main(["predict", str(run), str(asked), "--out", str(tmp_path / "out.jsonl"), *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "secret" not in error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_gguf_adapter_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "mine.gguf"
    assert main(["export", str(run), "--gguf", "--out", str(out)]) == 0
    names = {tensor.name for tensor in gguf.GGUFReader(out).tensors}
    weights = [f"blk.{layer}.attn_{role}.weight" for layer in (0, 1) for role in "qv"]
    assert names == {f"{weight}.lora_{side}" for weight in weights for side in "ab"}
    assert main(["export", str(run), "--gguf", "--out", str(tmp_path / "folder")]) == 2
    assert "expected the name of a file that ends in .gguf" in capsys.readouterr().err


def test_alpaca_has_one_question_and_texts_go_on(run: Path, tmp_path: Path) -> None:
    """With a template for one prompt, nothing is remembered."""
    trained = load_trained(run)
    import dataclasses

    data = dataclasses.replace(trained.recipe.data, template="alpaca", system=None)
    recipe = dataclasses.replace(trained.recipe, data=data)
    assert not Answerer(Inference(dataclasses.replace(trained, recipe=recipe))).remembers
    trained.backbone.tokenizer.chat_template = None
    texts = Answerer(Inference(trained))
    assert texts._prompter.ids([Message(USER, "red cat")]) == trained.backbone.tokenizer("red cat").input_ids
    with pytest.raises(UserError, match="more than the model has positions for"):
        texts.stream([Message(USER, "cat " * 64)], 5, lambda text: None)
