"""A run's scores on its own validation split and on files of one's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
from named_classes import ROUNDS, run_with_names
from tiny_models import save_tiny

from fedllm import UserError, evaluate_run, run_recipe
from fedllm.cli.commands import main
from fedllm.experiment.run import RunResult


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A finished run whose two classes are called no and yes."""
    return run_with_names(tiny, tmp_path_factory.mktemp("runs"))


def close(found: dict[str, float | None], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    assert all(found[name] == pytest.approx(wanted[name], rel=1e-5) for name in wanted)


def test_on_its_own_split_it_gives_the_scores_of_the_run(
    finished: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(finished.folder), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    close(found["scores"], finished.result["final"])
    assert (found["round"], found["samples"], found["data"]) == (2, 40, "validation split")
    for name, value in finished.result["final"].items():
        assert f"{value:.4f}" in next(line for line in said.splitlines() if line.strip().startswith(name))


def test_an_earlier_round_gives_its_scores(finished: RunResult) -> None:
    first = finished.metrics[0]
    found = evaluate_run(finished.folder, round=1)
    close(found.scores, {name: first[name] for name in found.scores})


def test_an_unfinished_run_is_evaluated_at_its_newest_checkpoint(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "000002")
    found = evaluate_run(folder)
    assert found.round == 1
    close(found.scores, {name: finished.metrics[0][name] for name in found.scores})


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
@pytest.mark.slow
def test_a_held_out_split_of_another_model_and_of_numbers(tiny: Path, tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path / family, family)
    text = (tiny / "train.csv").read_text().replace(",1,", ",1.5,")
    (tmp_path / "train.csv").write_text(text)
    words = [f"model.name={tmp_path / family}", "partition.scheme=iid", *ROUNDS, "data.max_validation=20",
             f"data.train={tmp_path / 'train.csv'}", "data.validation=null"]  # fmt: skip
    finished = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run")
    found = evaluate_run(finished.folder)
    assert {"pearson", "spearmanr", "eval_loss"} == set(found.scores)
    close(found.scores, finished.result["final"])
    assert found.samples == 20


def test_a_file_of_any_kind_and_with_other_column_names(finished: RunResult, tmp_path: Path) -> None:
    """The validation file itself, so that the scores are known."""
    source = finished.folder.parent / "validation.csv"
    rows = [line.split(",") for line in source.read_text().splitlines()[1:]]
    texts, labels = [row[0] for row in rows], [row[1] for row in rows]
    lines = "\n".join(json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True))
    (tmp_path / "v.jsonl").write_text(lines)
    pa_parquet.write_table(pa.table({"words": texts, "answer": labels}), tmp_path / "v.parquet")
    wanted = finished.result["final"]
    close(evaluate_run(finished.folder, source).scores, wanted)
    close(evaluate_run(finished.folder, tmp_path / "v.jsonl").scores, wanted)
    words = ["evaluate", str(finished.folder), str(tmp_path / "v.parquet"), "--text", "words", "--label", "answer"]
    assert main([*words, "--out", str(tmp_path / "scores.json")]) == 0
    close(json.loads((tmp_path / "scores.json").read_text())["scores"], wanted)


def test_numbers_stand_for_the_models_ids(
    finished: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (finished.folder.parent / "validation.csv").read_text()
    (tmp_path / "ids.csv").write_text(text.replace(",no,", ",0,").replace(",yes,", ",1,"))
    close(evaluate_run(finished.folder, tmp_path / "ids.csv").scores, finished.result["final"])
    assert "its numbers are taken for ids, 0 = 'no'" in capsys.readouterr().out


def test_ids_whose_names_a_parquet_file_declares(finished: RunResult, tmp_path: Path) -> None:
    """In another order than the model's."""
    rows = [line.split(",") for line in (finished.folder.parent / "validation.csv").read_text().splitlines()[1:]]
    table = pa.table({"text": [row[0] for row in rows], "label": [int(row[1] == "no") for row in rows]})
    features = {"label": {"names": ["yes", "no"], "_type": "ClassLabel"}}
    note = json.dumps({"info": {"features": features}})
    pa_parquet.write_table(table.replace_schema_metadata({"huggingface": note}), tmp_path / "v.parquet")
    close(evaluate_run(finished.folder, tmp_path / "v.parquet").scores, finished.result["final"])


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedllm: ")
    assert "Traceback" not in error
    return error


def test_labels_that_the_model_does_not_know(
    finished: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "v.csv").write_text("text,label\nred,yes\nblue cat,maybe\nred dog,perhaps\nblue,maybe\n")
    error = fails(capsys, "evaluate", finished.folder, tmp_path / "v.csv")
    assert (
        "v.csv, column 'label': 3 of 4 rows have a label that the model does not know, the first is 'maybe' in row 2; "
        "it knows 'no', 'yes'"
    ) in error
    assert "blue cat" not in error


def test_mistakes(finished: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished.folder
    (tmp_path / "v.csv").write_text("text,label\nred,yes\n")
    (tmp_path / "gap.csv").write_text("text,label\nred,yes\nred,\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "v.xls").write_text("x")
    file = tmp_path / "v.csv"
    assert "no such file" in fails(capsys, "evaluate", run, tmp_path / "none.csv")
    assert "the file is empty" in fails(capsys, "evaluate", run, tmp_path / "empty.csv")
    assert "cannot read '.xls' files" in fails(capsys, "evaluate", run, tmp_path / "v.xls")
    assert "--text: " in (said := fails(capsys, "evaluate", run, file, "--text", "texts"))
    assert "has no column 'texts' (did you mean 'text'?)" in said
    assert "has no column 'labels' (did you mean 'label'?)" in fails(capsys, "evaluate", run, file, "--label", "labels")
    assert "--label=text: is a column of text" in fails(capsys, "evaluate", run, file, "--label", "text")
    assert "1 of 2 rows has no value" in fails(capsys, "evaluate", run, tmp_path / "gap.csv")
    assert "expected fedllm evaluate RUN FILE" in fails(capsys, "evaluate", run, "--label", "label")
    assert "no such folder" in fails(capsys, "evaluate", run, "--out", tmp_path / "none" / "scores.json")
    assert "no such folder" in fails(capsys, "evaluate", tmp_path / "none")
    assert "no checkpoint of round 7" in fails(capsys, "evaluate", run, "--round", 7)


def test_a_validation_file_that_has_changed(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    source = finished.folder.parent / "validation.csv"
    (tmp_path / "validation.csv").write_text(source.read_text().rsplit("\n", 2)[0] + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(source), str(tmp_path / "validation.csv")))
    with pytest.raises(UserError, match=r"evaluated on another validation split .* put the data back, or name a file"):
        evaluate_run(folder)
