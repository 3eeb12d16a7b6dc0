"""A run on conversations: its plan, its clients, and what becomes of samples that are too long."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from causal_checkpoints import save_causal
from chats import chat as chat_of
from chats import chat_tokenizer, encode, split_of

from fedllm import load_recipe
from fedllm.common.errors import UserError
from fedllm.data.loading import Dataset
from fedllm.experiment.build import assemble
from fedllm.experiment.recipe_data import settle_samples, without_left_out
from fedllm.experiment.records import partition_summary
from fedllm.experiment.run import dry_run, run

TOOLS = ("git", "tar", "sed", "awk")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, 40 samples of four tools, of which every eighth is long, and a recipe over them."""
    folder = tmp_path_factory.mktemp("chats")
    save_causal(folder / "llama", "llama")
    rows = [
        {
            "prompt": f"the cat {row} {'very ' * (30 if row % 8 == 7 else row // 4)}red",
            "completion": f"dog {'ran ' * (row % 3)}sat",
            "tool": TOOLS[row % 4],
        }
        for row in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"""
model: {{name: {folder / "llama"}}}
lora: {{rank: 2, alpha: 4}}
data: {{task: causal_lm, train: {folder / "train.jsonl"}, max_length: 24, holdout: 0.2, too_long: drop}}
partition: {{scheme: dirichlet_classes, alpha: 0.5, clients: 4, column: tool, min_size: 4}}
algorithm: {{name: fedavg, lr: 1.0e-2}}
federation: {{rounds: 1, clients_per_round: 2}}
local: {{steps: 1, batch_size: 4}}
run: {{precision: float32, threads: 1, trackers: []}}
"""
    )
    return folder


def test_the_plan_shows_what_is_learned_and_what_is_left_out(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(chats / "recipe.yaml"))
    said = " ".join(capsys.readouterr().out.split())
    assert "values of tool '" in said
    assert "⟦dog" in said
    assert "</s>⟧" in said
    assert "tokens are learned (" in said
    assert "samples are longer than 24 tokens:" in said
    assert "were left out (data.too_long)" in said


def test_clients_have_no_sample_that_is_left_out(chats: Path) -> None:
    job = assemble(load_recipe(chats / "recipe.yaml"))
    tokens = job.problem.rows.tokens
    assert len(tokens) == len(job.dataset.train) < 32
    assert (tokens.sizes > 0).all()
    assert sorted(np.concatenate(job.parts)) == list(range(len(tokens)))
    found = partition_summary(job)
    assert found["classes"] == sorted(TOOLS)
    assert found["column"] == "tool"
    column = job.dataset.train.columns["tool"]
    for part, counts in zip(job.parts, found["counts"], strict=True):
        assert counts == [[column[row] for row in part].count(tool) for tool in sorted(TOOLS)]
    whole = assemble(load_recipe(chats / "recipe.yaml", ["data.too_long=cut_prompt"]))
    assert len(whole.dataset.train) == 32
    assert whole.data["training"] == job.data["training"], "digests are of all samples, whatever the model leaves out"
    assert whole.data["validation"] == job.data["validation"]


def test_a_client_with_nothing_left_is_an_error(chats: Path) -> None:
    with pytest.raises(UserError, match=r"data.too_long=drop: no sample of client \d+ has a learned token within data"):
        assemble(load_recipe(chats / "recipe.yaml", ["partition={scheme: iid, clients: 32, min_size: 1}"]))


def test_samples_that_are_left_out_leave_parts_and_splits() -> None:
    tokenizer = chat_tokenizer("chatml")
    talks = [chat_of("a", "b"), chat_of("x " * 50, "y"), chat_of("c", "d"), chat_of("e", "f")]
    tokens = encode(tokenizer, *talks, max_length=40, too_long="drop")
    split = split_of(*talks)
    dataset = Dataset("own", split, split, (), split.fingerprint())
    settled, parts, train, validation = settle_samples(dataset, [np.array([0, 1]), np.array([2, 3])], [tokens, tokens])
    assert [part.tolist() for part in parts] == [[0], [1, 2]]
    assert settled.train.conversations == [talks[0], talks[2], talks[3]]
    assert settled.fingerprint == dataset.fingerprint
    assert settled.validation is dataset.validation
    assert len(train) == len(validation) == 3
    assert settled.notes == tuple(f"{role}: {tokens.notes[0]}" for role in ("training", "validation"))
    assert without_left_out(train) is train


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_template(chats: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }} </s> {% endfor %}")
    recipe = load_recipe(chats / "recipe.yaml", [f"data.template={own}", f"run.dir={tmp_path / 'run'}"])
    run(recipe)
    own.write_text("{% for m in messages %}the {{ m.content }} </s> {% endfor %}")
    longer = load_recipe(
        chats / "recipe.yaml", [f"data.template={own}", f"run.dir={tmp_path / 'run'}", "federation.rounds=2"]
    )
    with pytest.raises(UserError, match=r"the run began with another chat template \(sha256 [0-9a-f]{12}, now"):
        run(longer)
    own.write_text("{% for m in messages %}{{ m.content }} </s> {% endfor %}")
    assert run(longer).result["rounds"] == 2
    found = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert (found["classes"], found["column"]) == (sorted(TOOLS), "tool")
