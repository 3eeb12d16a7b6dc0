"""The model card of an adapter folder: true, without texts or paths, the same for the same run, and its code works."""

from __future__ import annotations

import csv
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from tiny_models import WORDS, save_tiny

from fedllm import evaluate_run, load_recipe, run_recipe
from fedllm.data.loading import Split
from fedllm.experiment.export import export_adapter
from fedllm.experiment.model_card import TrainedOn, model_card
from fedllm.experiment.run import RunResult
from fedllm.experiment.trained import load_trained


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    overrides = ["run.seed=3", "data.title=red | blue", "federation.rounds=3"]
    return run_recipe(tiny / "recipe.yaml", overrides, tmp_path_factory.mktemp("runs") / "cards")


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def run_code(card: str, folder: Path) -> dict[str, Any]:
    """What the card's code leaves, with the folder's path in place."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert code.count('"."') == 1
    left: dict[str, Any] = {}
    exec(compile(code.replace('"."', repr(str(folder))), "card", "exec"), left)
    return left


def test_it_states_what_the_run_did(finished: RunResult) -> None:
    card = card_of(finished.folder / "adapter")
    data = json.loads((finished.folder / "partition.json").read_text())["data"]
    for said in (
        "# bert fine-tuned on red / blue",
        "| base model | bert (float32) |",
        "| task | classification of a text, 2 classes: `0`, `1` |",
        f"| data | red / blue; sha256 of the training split `{data['training']}`; sha256 of the validation split "
        f"`{data['validation']}` |",
        "| clients | 8, of which 5 train in a round; partition dirichlet_classes, alpha 0.5, seed 0 |",
        "| algorithm | `fadamgc`: lr 0.01, ",
        "| local training | epochs 1, batch size 8, max. 16 tokens per sample |",
        "| adapter | rank 2, alpha 4, dropout 0.1, targets [query, value]; "
        f"{finished.result['trainable_parameters']:,} trained values with the head |",
        "| rounds | 3 |",
        "| seed | 3 |",
        "| licence | to be filled in |",
        f"torch {version('torch')}",
    ):
        assert said in card
    for name, better in (("accuracy", max), ("macro_f1", max), ("eval_loss", min)):
        scores = [line[name] for line in finished.metrics]
        best = better(scores)
        row = f"| {name} | {scores[-1]:.4f} | {best:.4f} | {scores.index(best) + 1} |"
        assert row in card


def test_its_front_matter_has_what_is_known_and_no_more(finished: RunResult) -> None:
    """The tiny base is a folder, which has no name on the Hub; the data are a file."""
    found = ModelCard(card_of(finished.folder / "adapter")).data.to_dict()
    assert found == {
        "library_name": "peft",
        "pipeline_tag": "text-classification",
        "metrics": ["accuracy", "f1"],
        "tags": ["lora", "federated-learning", "fedllm", "fadamgc"],
    }


def test_a_base_and_data_of_the_hub_are_named(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", ["model.name=org/base", "data={name: glue/stsb, text: null}"])
    hub = tmp_path / "hub"
    save_tiny(hub / "models" / "org" / "base", "bert")
    from fedllm.models.loading import load_backbone
    from fedllm.tasks.selection import task_of

    task = task_of(recipe.data, ())
    backbone = load_backbone(recipe.model, task.head, local_hub=str(hub))
    card = model_card(recipe, backbone, task, TrainedOn([{"round": 1}], {}, None, 5))
    found = ModelCard(card).data.to_dict()
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "adapter")
    assert found["datasets"] == ["nyu-mll/glue"]
    assert found["metrics"] == ["pearsonr", "spearmanr"]
    assert "| task | a regression: one number for a pair of texts |" in card
    assert "No round was evaluated yet." in card
    assert "has no name on the Hub" not in card


def test_it_has_no_text_and_no_path(finished: RunResult, tiny: Path) -> None:
    card = card_of(finished.folder / "adapter")
    assert str(tiny) not in card
    assert str(finished.folder) not in card
    with (tiny / "train.csv").open(newline="") as file:
        assert not any(row["text"] in card for row in csv.DictReader(file))


@pytest.mark.slow
def test_resume_and_export_give_the_same_bytes(finished: RunResult, tiny: Path, tmp_path: Path) -> None:
    words = ["run.seed=3", "data.title=red | blue"]
    run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=2"], tmp_path / "run")
    run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=3"], tmp_path / "run")
    expected = card_of(finished.folder / "adapter")
    assert card_of(tmp_path / "run" / "adapter") == expected
    assert card_of(export_adapter(finished.folder, tmp_path / "exported")) == expected


def test_its_code_loads_the_adapter(finished: RunResult) -> None:
    left = run_code(card_of(finished.folder / "adapter"), finished.folder / "adapter")
    ours = load_trained(finished.folder).model
    inputs = left["tokenizer"]("red cat sat", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(left["model"](**inputs).logits, ours(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert left["classify"]("red cat sat")[0]["label"] in ("0", "1")


def test_its_code_for_pairs_separates_the_texts_as_in_training(tiny: Path, tmp_path: Path) -> None:
    """GPT-2's tokenizer puts nothing between the two texts; fedllm puts its eos token there. And a regression."""
    save_tiny(tmp_path / "gpt2", "gpt2")
    rows = ["a,b,label", *(f"{WORDS[i % 20]} {WORDS[i // 2]},the dog sat,{i / 8}" for i in range(40))]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    words = [
        f"model.name={tmp_path / 'gpt2'}", "federation.rounds=1", "partition.scheme=iid",
        f"data={{train: {tmp_path / 'pairs.csv'}, validation: null, text: [a, b], label: label}}",
    ]  # fmt: skip
    folder = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    card = card_of(folder / "adapter")
    assert '"text_pair": "</s>another text"' in card
    classify = run_code(card, folder / "adapter")["classify"]
    (answer,) = classify([{"text": "red cat", "text_pair": "</s>the dog sat"}])
    run = load_trained(folder)
    split = Split([["red cat"], ["the dog sat"]], np.zeros(1, np.float32), {})
    inputs = run.task.encode(split, run.backbone.tokenizer, 16).rows(torch.tensor([0]))
    with torch.no_grad():
        assert answer["score"] == pytest.approx(float(run.model(**inputs).logits), rel=1e-4)


def test_its_code_loads_the_quantised_base(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = ["model.quantize=8bit", "federation.rounds=1"]
    folder = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    card = card_of(folder / "adapter")
    assert "| base model | bert (float32, quantised to 8bit) |" in card
    left = run_code(card, folder / "adapter")
    assert left["model"].is_loaded_in_8bit
    assert left["classify"]("red cat sat")[0]["label"] in ("0", "1")
    assert evaluate_run(folder).scores["eval_loss"] == pytest.approx(
        json.loads((folder / "result.json").read_text())["final"]["eval_loss"], rel=1e-5
    )
