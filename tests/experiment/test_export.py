"""Exports of a round, of the best round, and of the merged model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import UserError, export_adapter, export_merged, run_recipe
from fedllm.cli.commands import main
from fedllm.experiment.run import RunResult
from fedllm.experiment.trained import load_trained

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", ["federation.rounds=3"], tmp_path_factory.mktemp("runs") / "run")


def with_scores(finished: RunResult, folder: Path, accuracies: list[float]) -> Path:
    """A copy of the run, unfinished and with other scores."""
    shutil.copytree(finished.folder, folder)
    (folder / "result.json").unlink()
    lines = [{**line, "accuracy": score} for line, score in zip(finished.metrics, accuracies, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def same(one: Path, other: Path) -> bool:
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_round_gives_the_adapter_of_a_run_of_that_length(finished: RunResult, tiny: Path, tmp_path: Path) -> None:
    shorter = run_recipe(tiny / "recipe.yaml", ["federation.rounds=2"], tmp_path / "shorter")
    assert main(["export", str(finished.folder), "--round", "2", "--out", str(tmp_path / "two")]) == 0
    assert same(tmp_path / "two", shorter.folder / "adapter")
    card, theirs = ((folder / "README.md").read_text() for folder in (tmp_path / "two", shorter.folder / "adapter"))
    assert card == theirs


def test_without_out_no_round_replaces_the_runs_own_adapter(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    before = (folder / "adapter" / WEIGHTS).read_bytes()
    assert export_adapter(folder, round=2).name == "adapter-round-2"
    assert export_merged(folder, round=2).name == "merged-round-2"
    assert export_merged(folder).name == "merged"
    assert (folder / "adapter" / WEIGHTS).read_bytes() == before


def test_the_best_round_is_exported_while_it_is_kept(finished: RunResult, tmp_path: Path) -> None:
    folder = with_scores(finished, tmp_path / "run", [0.5, 0.9, 0.8])
    assert main(["export", str(folder), "--best", "--out", str(tmp_path / "best")]) == 0
    assert same(tmp_path / "best", export_adapter(folder, round=2))


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ("constant", "run its recipe with federation.rounds=1 and another run.dir"),
        ("cosine_rounds", "run.checkpoint_every=1 and another run.dir, end it with Ctrl-C after round 1, and export"),
    ],
)
def test_a_best_round_that_is_gone(finished: RunResult, tmp_path: Path, schedule: str, advice: str) -> None:
    folder = with_scores(finished, tmp_path / "run", [0.9, 0.5, 0.8])
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("schedule: constant", f"schedule: {schedule}"))
    with pytest.raises(UserError, match=re.escape(advice)) as error:
        export_adapter(folder, best=True)
    assert (
        "accuracy is best in round 1 (0.9000), whose weights are not kept; there are checkpoints of rounds 2 and 3, "
        "which --round exports"
    ) in str(error.value)


def test_the_merged_model_needs_no_peft(finished: RunResult, tmp_path: Path) -> None:
    """Its card's code is that of a plain transformers folder."""
    out = tmp_path / "merged"
    assert main(["export", str(finished.folder), "--merge", "--out", str(out)]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(out)
    inputs = AutoTokenizer.from_pretrained(out)(["red cat", "the dog ran"], padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = load_trained(finished.folder).model(**inputs).logits
        torch.testing.assert_close(merged(**inputs).logits, wanted, atol=1e-5, rtol=1e-5)
    card = (out / "README.md").read_text()
    assert "library_name: transformers" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    left: dict[str, Any] = {}
    exec(compile(code.replace('"."', repr(str(out))), "card", "exec"), left)
    assert left["classify"]("red cat")[0]["label"] in ("0", "1")


def test_mistakes(finished: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*words: object) -> str:
        assert main(["export", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("fedllm: ")
        assert "Traceback" not in error
        return error

    run = finished.folder
    assert "has no checkpoint of round 1; it has those of rounds 2 and 3" in fails(run, "--round", 1)
    assert "no such folder" in fails(tmp_path / "none", "--merge")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("kept")
    assert "is no adapter" in fails(run, "--out", tmp_path / "full")
    assert "exists already and is not empty" in fails(run, "--merge", "--out", tmp_path / "full")
    shutil.copytree(run, tmp_path / "quantised")
    recipe = tmp_path / "quantised" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("quantize: none", "quantize: 4bit"))
    assert "model.quantize=4bit, whose weights cannot take up an adapter" in fails(tmp_path / "quantised", "--merge")
    (tmp_path / "empty").mkdir()
    shutil.copy(run / "recipe.yaml", tmp_path / "empty")
    assert "has no checkpoint yet" in fails(tmp_path / "empty")
    with pytest.raises(UserError, match="found both"):
        export_adapter(run, round=2, best=True)
    with pytest.raises(SystemExit):
        main(["export", str(run), "--round", "2", "--best"])
