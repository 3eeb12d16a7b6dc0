"""Predictions for files: those of transformers' pipeline, in order, whatever the kinds of the files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
from named_classes import ROUNDS, run_with_names
from tiny_models import WORDS, save_tiny
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedllm import UserError, load_predictor, predict_file, run_recipe
from fedllm.cli.commands import main
from fedllm.data import row_stream, row_writer
from fedllm.experiment import inference


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose two classes are called no and yes."""
    return run_with_names(tiny, tmp_path_factory.mktemp("runs")).folder


def texts_of(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 25))) for _ in range(count)]


def expected(run: Path, texts: list[Any]) -> list[dict[str, float]]:
    """Class -> probability of each text, from transformers' pipeline on the run's adapter, one text at a time."""
    folder = run / "adapter"
    config = AutoConfig.from_pretrained(folder / "base_config.json")
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, truncation=True, max_length=16)
    return [{each["label"]: each["score"] for each in classify([text], top_k=None)[0]} for text in texts]


def agree(found: list[dict[str, Any]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for row, scores in zip(found, wanted, strict=True):
        assert row["prediction"] == max(scores, key=lambda name: scores[name])
        for name, score in scores.items():
            assert float(row[f"probability_{name}"]) == pytest.approx(score, abs=1e-5)


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pa_parquet.read_table(path).to_pylist()
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_they_are_those_of_transformers_pipeline(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """In chunks of 7 rows and batches of 40 tokens, of texts longer than the model's 16 tokens too."""
    monkeypatch.setattr(row_stream, "CHUNK", 7)
    monkeypatch.setitem(inference._BATCH_TOKENS, "cpu", 40)
    texts = texts_of(30)
    table = pa.table({"id": range(30), "text": texts})
    pa_parquet.write_table(table, tmp_path / "texts.parquet")
    out = tmp_path / f"out{suffix}"
    done = predict_file(run, tmp_path / "texts.parquet", out, probabilities=True)
    rows = read(out)
    assert (done.rows, done.round) == (30, 2)
    assert list(rows[0]) == ["id", "text", "prediction", "probability_no", "probability_yes"]
    assert [(int(row["id"]), row["text"]) for row in rows] == list(enumerate(texts))
    agree(rows, expected(run, texts))
    assert {row["prediction"] for row in rows} == {"no", "yes"}


CELLS = [["007", 'a "red", cat'], ["", "two\nlines"], ["1.10", "the  dog "], ["NA", "é"]]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_csv_keeps_its_cells(run: Path, tmp_path: Path, suffix: str) -> None:
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *CELLS])
    out = tmp_path / f"out{suffix}"
    assert main(["predict", str(run), str(tmp_path / "texts.csv"), "--out", str(out)]) == 0
    rows = read(out)
    assert [[row["id"] or "", row["text"]] for row in rows] == CELLS
    assert list(rows[0]) == ["id", "text", "prediction"]


def test_json_records_keep_their_values_and_gaps(run: Path, tmp_path: Path) -> None:
    records = [{"text": "red cat", "n": 1.0, "tags": ["a"]}, {"n": "two", "text": "blue é"}, {"text": ""}]
    (tmp_path / "list.json").write_text(json.dumps(records))
    (tmp_path / "lines.jsonl").write_text("\n\n".join(json.dumps(record) for record in records))
    for name in ("list.json", "lines.jsonl"):
        predict_file(run, tmp_path / name, tmp_path / "out.jsonl")
        rows = read(tmp_path / "out.jsonl")
        assert [{k: v for k, v in row.items() if k != "prediction"} for row in rows] == records
        assert (type(rows[0]["n"]), list(rows[1])) == (float, ["n", "text", "prediction"])


def test_parquet_keeps_its_types(run: Path, tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["red cat", "blue dog"], pa.large_string()),
            "day": pa.array([1, None], pa.date32()),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    pa_parquet.write_table(table, tmp_path / "in.parquet")
    predict_file(run, tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = pa_parquet.read_table(tmp_path / "out.parquet")
    assert found.drop_columns("prediction").equals(table)


@pytest.mark.slow
def test_pairs_and_numbers(tiny: Path, tmp_path: Path) -> None:
    """A regression on pairs of texts, with GPT-2, whose tokenizer does not separate them by itself."""
    save_tiny(tmp_path / "gpt2", "gpt2")
    rows = ["a,b,label", *(f"{WORDS[i % 20]} {WORDS[i // 2]},the dog sat,{i / 8}" for i in range(40))]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    words = [
        f"model.name={tmp_path / 'gpt2'}", "partition.scheme=iid", *ROUNDS,
        f"data={{train: {tmp_path / 'pairs.csv'}, validation: null, text: [a, b], label: label}}",
    ]  # fmt: skip
    run = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    (tmp_path / "in.csv").write_text("one,two\nred cat,the dog sat\nbig tree,on the mat\n")
    out = tmp_path / "out.jsonl"
    assert (
        main(["predict", str(run), str(tmp_path / "in.csv"), "--out", str(out), "--text", "one", "--text", "two"]) == 0
    )
    pairs = [{"text": row["one"], "text_pair": f"</s>{row['two']}"} for row in read(out)]
    wanted = [next(iter(scores.values())) for scores in expected(run, pairs)]
    assert [row["prediction"] for row in read(out)] == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(UserError, match="predicts numbers, which have none; leave it out"):
        predict_file(run, tmp_path / "in.csv", out, text=["one", "two"], probabilities=True)


def test_in_memory(run: Path) -> None:
    texts = texts_of(5)
    found = load_predictor(run).predict(texts)
    assert found.values == [max(scores, key=lambda name: scores[name]) for scores in expected(run, texts)]
    assert found.probabilities is not None
    assert found.probabilities.sum(dim=1).tolist() == pytest.approx([1.0] * 5)


def fails(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    assert main([str(word) for word in words]) == code
    error = capsys.readouterr().err
    assert error.startswith("fedllm: ")
    assert "Traceback" not in error
    return error


MISTAKES: dict[str, tuple[str, str, list[str], str]] = {
    "no such file": ("missing.csv", "out.csv", [], "missing.csv: no such file"),
    "a kind that is not known": ("in.xlsx", "out.csv", [], "cannot read '.xlsx' files; expected one of .csv, .tsv"),
    "an empty file": ("empty.csv", "out.csv", [], "empty.csv: the file is empty"),
    "a header alone": ("header.csv", "out.csv", [], "header.csv: the file holds no rows"),
    "no such column": ("in.csv", "out.csv", ["--text", "texts"], "has no column 'texts' (did you mean 'text'?)"),
    "two columns for one": ("in.csv", "out.csv", ["--text", "text", "--text", "id"], "found 2 columns (text, id), exp"),
    "a missing text": ("gap.csv", "out.csv", [], "gap.csv, row 2, column 'text': found no value"),
    "a number as text": ("number.jsonl", "out.csv", [], "row 1, column 'text': found a value of type int"),
    "a column of that name": ("taken.csv", "out.csv", [], "has a column 'prediction' already"),
    "torn JSON": ("torn.jsonl", "out.csv", [], "torn.jsonl: not a readable .jsonl file: line 2, column"),
    "a row too wide": ("wide.csv", "out.csv", [], "row 1 has 3 columns, expected 2"),
    "Latin-1": ("latin.csv", "out.csv", [], "not utf-8 text; save it as utf-8"),
    "quotes that are plain characters": ("quotes.tsv", "out.csv", [], "row 2, column 'text': found a quote at its beg"),
    "not parquet": ("no.parquet", "out.csv", [], "no.parquet: not a readable .parquet file"),
    "out of a kind that is not known": ("in.csv", "out.txt", [], "cannot write '.txt' files; expected one of .csv"),
    "out in no folder": ("in.csv", "none/out.csv", [], "no such folder: "),
    "out is the input": ("in.csv", "in.csv", [], "in.csv: is the input, which is not overwritten"),
    "out is a folder": ("in.csv", "folder.csv", [], "folder.csv: is a folder"),
    "no such round": ("in.csv", "out.csv", ["--round", "9"], "no checkpoint of round 9; it has those of rounds"),
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    contents = {
        "in.csv": "id,text\n1,red cat\n", "in.xlsx": "x", "empty.csv": "", "header.csv": "id,text\n",
        "gap.csv": "id,text\n1,red\n2,\n", "number.jsonl": '{"text": 5}\n', "no.parquet": "no",
        "taken.csv": "prediction,text\n1,red\n", "torn.jsonl": '{"text": "red"}\n{"text"\n',
        "wide.csv": "id,text\n1,2,3\n", "quotes.tsv": 'id\ttext\n1\tred\n2\t"red\n3\t"cat\n',
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.csv").write_bytes("id,text\n1,é\n".encode("latin-1"))
    (tmp_path / "folder.csv").mkdir()
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(run: Path, files: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    file, out, words, said = MISTAKES[mistake]
    before = sorted(files.iterdir())
    assert said in fails(capsys, "predict", run, files / file, "--out", files / out, *words)
    assert sorted(files.iterdir()) == before


def test_no_run_and_no_checkpoint(run: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = [files / "in.csv", "--out", files / "out.csv"]
    assert "missing: no such folder" in fails(capsys, "predict", files / "missing", *rest)
    assert "not a run folder: it has no recipe.yaml" in fails(capsys, "predict", files, *rest)
    (files / "new").mkdir()
    (files / "new" / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    assert "new: has no checkpoint yet" in fails(capsys, "predict", files / "new", *rest)


def test_what_fails_midway_leaves_the_earlier_file(
    run: Path, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "out.csv").write_text("earlier")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_writer, "sync", full)
    before = sorted(files.iterdir())
    error = fails(capsys, "predict", run, files / "in.csv", "--out", files / "out.csv", code=1)
    assert "out.csv could not be written: [Errno 28] No space left on device; make room" in error
    assert (files / "out.csv").read_text() == "earlier"
    assert sorted(files.iterdir()) == before
    monkeypatch.undo()
    assert main(["predict", str(run), str(files / "in.csv"), "--out", str(files / "out.csv")]) == 0
    assert read(files / "out.csv")[0]["id"] == "1"
