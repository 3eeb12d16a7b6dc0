"""A recipe with `lora: null`: run, resume, export, evaluation, prediction, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from launched import launch, numbers
from safetensors.torch import load_file
from tiny_models import WORDS, save_tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedllm import run_recipe
from fedllm.cli.commands import main
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment import full_memory
from fedllm.experiment.build import assemble
from fedllm.experiment.evaluate_run import evaluate_run
from fedllm.experiment.export import export_adapter
from fedllm.experiment.resume import OtherRunError
from fedllm.experiment.run import RunResult
from fedllm.problems.full.problem import FullProblem
from fedllm.results.reader import load_run

FULL = [
    "lora=null", "run.threads=1", "run.trackers=[]", "run.precision=float32", "algorithm.lr=0.001",
    "federation.clients_per_round=2", "federation.tracked_per_round=2", "eval.every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Two rounds of FAdamGC on all weights of the tiny BERT, which has dropout."""
    return run_recipe(tiny / "recipe.yaml", [*FULL, "federation.rounds=2"], tmp_path_factory.mktemp("full") / "run")


def same_model(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_run_writes_a_plain_model_with_tokenizer_and_card(run: RunResult) -> None:
    names = {path.name for path in (run.folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
    assert not (run.folder / "adapter").exists()
    card = (run.folder / "model" / "README.md").read_text()
    assert "A model with all its weights, trained by federated learning" in card
    assert "library_name: transformers" in card
    assert "lora" not in card
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "model")
    assert sum(value.numel() for value in model.parameters()) == run.result["trainable_parameters"]
    classify = pipeline("text-classification", str(run.folder / "model"))
    assert classify("red cat")[0]["label"] in ("0", "1")


def test_the_model_scores_what_the_run_says(run: RunResult) -> None:
    found = evaluate_run(run.folder)
    assert found.scores == pytest.approx(run.result["final"], abs=1e-5)
    assert load_run(run.folder).finished


def test_the_written_model_has_the_logits_that_evaluation_used(run: RunResult, tiny: Path) -> None:
    job = assemble(load_recipe(tiny / "recipe.yaml", FULL))
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "model").eval()
    x = job.problem.space.gather(model)
    outputs = job.problem.outputs(x, job.validation)
    index = torch.arange(5)
    with torch.no_grad():
        expected = model(**job.validation.rows(index, pad_id=1)).logits
    assert torch.allclose(outputs[:5], expected, atol=1e-5)
    assert not torch.allclose(x, job.problem.initial())


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_a_whole_one(run: RunResult, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*FULL, "run.checkpoint_every=1"]
    run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=1"], folder)
    run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=2"], folder)
    assert same_model(folder, run.folder)
    assert numbers(folder)[1] == numbers(run.folder)[1]  # the shorter run evaluated its last round, the first one


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tiny: Path, tmp_path: Path) -> None:
    words = [*FULL, "federation.rounds=2"]
    one = run_recipe(tiny / "recipe.yaml", [*words, "run.shares=2"], tmp_path / "one").folder
    done = launch("scripts/fedtune.py", str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'two'}", *words)
    assert done.returncode == 0, done.stderr
    assert same_model(tmp_path / "two", one)
    assert numbers(tmp_path / "two") == numbers(one)


def test_export_and_predict(run: RunResult, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run.folder), "--out", str(tmp_path / "out")]) == 0
    assert f"model written to {tmp_path / 'out'}" in capsys.readouterr().out.replace("\n", "")
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "out", run.folder / "model"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert export_adapter(run.folder, round=2) == (run.folder / "model-round-2").resolve()
    predictions = tmp_path / "predictions.csv"
    assert main(["predict", str(run.folder), str(tiny / "validation.csv"), "--out", str(predictions)]) == 0
    assert len(predictions.read_text().splitlines()) == 41
    assert main(["export", str(run.folder), "--merge"]) == 2
    assert "trained all weights, so there is no adapter; export it without --merge" in capsys.readouterr().err.replace(
        "\n", " "
    )


def test_a_folder_that_is_no_model_is_not_replaced(run: RunResult, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no model .* so it is not replaced"):
        export_adapter(run.folder, tmp_path)


def test_the_dry_run_counts_memory_and_bytes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny / "recipe.yaml"), *FULL, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    job = assemble(load_recipe(tiny / "recipe.yaml", FULL))
    assert f"{job.problem.dim:,}, all weights" in said
    assert "a client's batch is a pass" in said
    assert "MiB at once (the model" in said


def test_the_recipe_of_the_folder_is_read_back(run: RunResult) -> None:
    saved = load_recipe(run.folder / "recipe.yaml")
    assert saved.lora is None
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["lora"] is None


def test_a_run_with_adapters_does_not_go_on_with_all_weights(run: RunResult, tiny: Path, tmp_path: Path) -> None:
    words = [word for word in FULL if word != "lora=null"]
    with pytest.raises(OtherRunError, match=r"lora: None there, \{'rank': 2"):
        run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=2"], run.folder)
    folder = run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=1"], tmp_path / "adapters").folder
    with pytest.raises(OtherRunError, match=r"lora: \{.*'rank': 2.*\} there, None here"):
        run_recipe(tiny / "recipe.yaml", [*FULL, "federation.rounds=1"], folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.quantize=8bit"], "model.quantize: found 8bit, but lora: null trains all weights"),
        (["model.dtype=bfloat16"], "model.dtype: found bfloat16, but lora: null trains all weights"),
        (["run.gradient_checkpointing=true"], "run.gradient_checkpointing: found true, which works with adapters only"),
        (["run.slices=2"], "run.slices: found 2, which cuts rows of models with adapters"),
        (["lora.rank=4"], "lora.rank: found 4, but lora is null here"),
    ],
)
def test_settings_that_do_not_go_with_all_weights(tiny: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(tiny / "recipe.yaml", ["lora=null", *words])


def test_a_norm_for_a_model_with_adapters_or_without_batch_norm_is_refused(tiny: Path) -> None:
    with pytest.raises(UserError, match=r"model.norm: found group, but the batch norm of a model with adapters is"):
        load_recipe(tiny / "recipe.yaml", ["model.norm=group"])
    with pytest.raises(UserError, match=r"model.norm=local: model '.*bert' has no batch norm; leave model.norm out"):
        assemble(load_recipe(tiny / "recipe.yaml", ["lora=null", "model.norm=local"]))


def test_stacked_clients_need_a_model_without_dropout(tiny: Path) -> None:
    with pytest.raises(UserError, match="BertForSequenceClassification cannot train stacked clients"):
        assemble(load_recipe(tiny / "recipe.yaml", [*FULL, "run.stacked_clients=2"]))
    job = assemble(load_recipe(tiny / "recipe.yaml", [*FULL, "run.stacked_clients=2", "model.dropout=0"]))
    assert isinstance(job.problem, FullProblem)
    assert (job.problem.stacked, job.stacked_clients) == (True, 2)
    assert assemble(load_recipe(tiny / "recipe.yaml", FULL)).stacked_clients == 1


def test_too_little_memory_is_said_before_the_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_memory, "usable_memory", lambda device: 2**20)
    with pytest.raises(
        UserError, match=r"lora: null trains all weights, which needs about .* MiB at once .*; 1 MiB of cpu"
    ):
        assemble(load_recipe(tiny / "recipe.yaml", FULL))


def test_a_model_from_random_weights(tiny: Path, tmp_path: Path) -> None:
    found = run_recipe(tiny / "recipe.yaml", [*FULL, "model.pretrained=false", "federation.rounds=1"], tmp_path / "run")
    card = (found.folder / "model" / "README.md").read_text()
    assert "bert trained from random weights on" in card
    AutoTokenizer.from_pretrained(found.folder / "model")
    assert json.loads((found.folder / "result.json").read_text())["client_memory"]["frozen weights"] == 0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny GPT-2 from random weights, over plain texts of two speakers."""
    folder = tmp_path_factory.mktemp("texts")
    save_tiny(folder / "gpt2", "gpt2", headless=False)
    lines = [
        {"text": f"the {('cat sat', 'dog ran')[row % 2]} on the mat and {WORDS[row % 20]} was red", "speaker": row % 2}
        for row in range(24)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(
        f"""
model: {{name: {folder / "gpt2"}, pretrained: false}}
lora: null
data: {{task: causal_lm, train: {folder / "train.jsonl"}, format: text, learn: all, max_length: 20, holdout: 0.25}}
partition: {{scheme: by_column, column: speaker}}
algorithm: {{name: fedadamw, lr: 1.0e-2}}
federation: {{rounds: 2}}
local: {{steps: 8, batch_size: 4}}
eval: {{every: 2, start: true, samples: 2, new_tokens: 4}}
run: {{precision: float32, threads: 1, trackers: []}}
"""
    )
    return folder


def test_a_language_model_learns_from_random_weights(texts: Path, tmp_path: Path) -> None:
    """Perplexity falls, the folder is a plain language model with the run's loss, and answers are written."""
    found = run_recipe(texts / "recipe.yaml", run_dir=tmp_path / "run")
    before, after = found.result["start"]["perplexity"], found.result["final"]["perplexity"]
    assert after < 0.7 * before
    assert len((found.folder / "samples.jsonl").read_text().splitlines()) == 2
    model = AutoModelForCausalLM.from_pretrained(found.folder / "model").eval()
    job = assemble(load_recipe(texts / "recipe.yaml"))
    total = 0.0
    for sample in range(len(job.validation)):
        rows = job.validation.rows(torch.tensor([sample]))
        with torch.no_grad():
            total += float(model(**rows, labels=rows["input_ids"]).loss) * (rows["input_ids"].shape[1] - 1)
    assert job.validation.learned is not None
    learned = int(job.validation.sizes.sum())
    assert learned == len(job.validation.input_ids) - len(job.validation)  # all but each sample's first token
    assert total / learned == pytest.approx(found.result["final"]["eval_loss"], abs=1e-4)
    assert evaluate_run(found.folder).scores == pytest.approx(found.result["final"], abs=1e-4)
