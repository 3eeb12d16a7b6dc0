"""Runs of causal language models, from a file of conversations to an adapter that plain PEFT loads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from adapters import same_bits
from causal_checkpoints import save_causal
from counted_rounds import counted
from launched import launch
from peft import PeftModel
from tiny_models import WORDS
from transformers import AutoModelForCausalLM

from fedllm import run_recipe
from fedllm.cli.commands import main
from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment.answers import last_prompts
from fedllm.experiment.build import Job, assemble
from fedllm.federation import sampling
from fedllm.federation.rounds import Plan, run_round, start

ANIMALS, ACTS = ("cat", "dog", "mat", "tree"), ("sat", "ran", "is", "was")


def write_pairs(path: Path, rows: int, first: int) -> None:
    """`the cat on dog` -> `cat sat`: the response depends on the prompt. Options: two other acts."""
    lines = []
    for number in range(first, first + rows):
        animal, other = ANIMALS[number % 4], WORDS[(7 * number) % 20]
        act, wrong = ACTS[number % 4], ACTS[(number + 1 + number // 4 % 3) % 4]
        answer, false = f"{animal} {act}", f"{animal} {wrong} {other}"
        options = [answer, false] if number % 3 else [false, answer]
        lines.append(
            {"prompt": f"the {animal} on {other} {number % 7 * 'very '}", "completion": answer, "options": options,
             "right": options.index(answer), "topic": animal}
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, files of prompts and completions, and a recipe over them."""
    folder = tmp_path_factory.mktemp("causal")
    save_causal(folder / "llama", "llama")
    write_pairs(folder / "train.jsonl", 64, 0)
    write_pairs(folder / "validation.jsonl", 16, 64)
    (folder / "recipe.yaml").write_text(
        f"""
model: {{name: {folder / "llama"}, dropout: 0.0}}
lora: {{rank: 4, alpha: 8, targets: [query, value]}}
data: {{task: causal_lm, train: {folder / "train.jsonl"}, validation: {folder / "validation.jsonl"}, max_length: 40}}
partition: {{scheme: by_column, column: topic}}
algorithm: {{name: fadamgc, lr: 2.0e-2}}
federation: {{rounds: 4, clients_per_round: 3, tracked_per_round: 2}}
local: {{steps: 3, batch_size: 4}}
eval: {{start: true, by: topic, samples: 3, new_tokens: 6, every: 2}}
run: {{precision: float32, threads: 1, checkpoint_every: 1, trackers: []}}
"""
    )
    return folder


@pytest.fixture(scope="module")
def run(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_recipe(causal / "recipe.yaml", run_dir=folder / "one")
    return folder / "one"


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def plain_scores(model: Any, job: Job) -> dict[str, float]:
    """Loss, perplexity, token accuracy and exact match, one sample at a time."""
    loss = tokens = right = whole = 0.0
    held = job.validation
    for sample in range(len(held)):
        begin, end = held.offsets[sample : sample + 2].tolist()
        ids, learned = held.input_ids[begin:end].long(), held.learned[begin:end]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1][learned[1:]]
        wanted = ids[1:][learned[1:]]
        hits = int((logits.argmax(dim=-1) == wanted).sum())
        loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
        tokens, right, whole = tokens + len(wanted), right + hits, whole + (hits == len(wanted))
    mean = loss / tokens
    return {
        "token_accuracy": right / tokens, "perplexity": math.exp(mean), "exact_match": whole / len(held),
        "eval_loss": mean,
    }  # fmt: skip


def test_plain_peft_gives_the_scores_of_the_run(causal: Path, run: Path) -> None:
    job = assemble(load_recipe(causal / "recipe.yaml"))
    job.problem.release()
    base = AutoModelForCausalLM.from_pretrained(causal / "llama").eval()
    before = plain_scores(base, job)
    told = result(run)
    assert told["primary"] == "token_accuracy"
    assert told["start"] == pytest.approx(before, rel=1e-5)
    tuned = PeftModel.from_pretrained(base, run / "adapter").eval()
    after = plain_scores(tuned, job)
    assert told["final"] == pytest.approx(after, rel=1e-5)
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert sum(own["samples"] for own in told["by"]["values"].values()) == 16
    assert list(told["by"]["values"]) == ["cat", "dog", "mat", "tree"]


def test_the_answers_are_those_of_generate(causal: Path, run: Path) -> None:
    job = assemble(load_recipe(causal / "recipe.yaml"))
    job.problem.release()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(causal / "llama"), run / "adapter").eval()
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    prompts = last_prompts(job.validation, [line["sample"] for line in lines])
    for line, prompt in zip(lines, prompts, strict=True):
        ids = torch.tensor([prompt.ids])
        asked = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 2, "repetition_penalty": 1.0}
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)[0, len(prompt.ids) :]
        assert line["after"] == job.backbone.tokenizer.decode(found, skip_special_tokens=True).strip()
        assert prompt.reference[-1] == 2
        assert line["reference"].split()[-1] in ACTS


def test_moon_is_refused_before_the_first_round(causal: Path) -> None:
    with pytest.raises(UserError, match="MOON: found a causal language model, expected a classifier"):
        assemble(load_recipe(causal / "recipe.yaml", ["algorithm={name: moon}"]))


def test_the_choice_is_the_likeliest_option(causal: Path, tmp_path: Path) -> None:
    words = ["data.choices=options", "data.answer=right", "eval.samples=0", "federation.rounds=1"]
    told = run_recipe(causal / "recipe.yaml", words, tmp_path / "run").result
    assert told["primary"] == "choice_accuracy"
    base = AutoModelForCausalLM.from_pretrained(causal / "llama")
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    tokenizer = assemble(load_recipe(causal / "recipe.yaml")).backbone.tokenizer
    right = right_norm = 0
    rows = [json.loads(line) for line in (causal / "validation.jsonl").read_text().splitlines()]
    for row in rows:
        sums = []
        for option in row["options"]:
            messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": option}]
            asked, whole = (
                tokenizer(
                    tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=part is not messages),
                    add_special_tokens=False,
                )["input_ids"]
                for part in (messages[:1], messages)
            )
            ids = torch.tensor(whole[: len(whole) - 1])  # without </s>
            with torch.no_grad():
                logs = F.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1)
            sums.append(sum(float(logs[k - 1, ids[k]]) for k in range(len(asked), len(ids))))
        per_byte = [value / len(option) for value, option in zip(sums, row["options"], strict=True)]
        right += sums.index(max(sums)) == row["right"]
        right_norm += per_byte.index(max(per_byte)) == row["right"]
    assert told["final"]["choice_accuracy"] == right / len(rows)
    assert told["final"]["choice_accuracy_norm"] == right_norm / len(rows)


def test_a_resumed_run_has_the_same_bits(
    causal: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        counted(patch, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(causal / "recipe.yaml", run_dir=tmp_path / "run")
    run_recipe(causal / "recipe.yaml", run_dir=tmp_path / "run")
    assert same_bits(tmp_path / "run", run)
    assert result(tmp_path / "run")["by"] == result(run)["by"]


@pytest.mark.parametrize("words", [["run.stacked_clients=1"], ["run.slices=1"], ["run.gradient_checkpointing=true"]])
@pytest.mark.slow
def test_grouping_changes_nothing_beyond_rounding(causal: Path, run: Path, tmp_path: Path, words: list[str]) -> None:
    other = run_recipe(causal / "recipe.yaml", words, tmp_path / "run").result
    assert other["final"]["eval_loss"] == pytest.approx(result(run)["final"]["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(causal: Path, run: Path, tmp_path: Path) -> None:
    """Bit for bit, where one process cuts its rounds into as many shares; else up to rounding."""
    done = launch("scripts/fedtune.py", str(causal / "recipe.yaml"), f"run.dir={tmp_path / 'two'}")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "two")["final"] == pytest.approx(result(run)["final"], rel=1e-4)
    assert (tmp_path / "two" / "samples.jsonl").read_text() == (run / "samples.jsonl").read_text()
    run_recipe(causal / "recipe.yaml", ["run.shares=2"], tmp_path / "one")
    assert same_bits(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_tune_measures_it(causal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In rows without padding, and in padded ones."""
    assert main(["tune", str(causal / "recipe.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "best: run.stacked_clients=" in said
    assert "packed" in said
    assert "padded, 1 slice" in said


@pytest.mark.slow
def test_a_run_stops_at_a_target_that_falls(causal: Path, run: Path, tmp_path: Path) -> None:
    """Perplexity 40: the first evaluation, after two of four rounds, ends the run."""
    words = ["eval.target={perplexity: 40}", "eval.stop_at_target=true", "eval.samples=0"]
    told = run_recipe(causal / "recipe.yaml", words, tmp_path / "run").result
    assert told["final"]["perplexity"] <= 40
    assert (told["rounds_to_target"], told["rounds"], result(run)["rounds"]) == (2, 2, 4)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadamw", "localadamw", "padamfed", "fa_nt"])
@pytest.mark.slow
def test_algorithms_of_every_kind_train_it(causal: Path, tmp_path: Path, algorithm: str) -> None:
    words = [f"algorithm={{name: {algorithm}}}", "federation.rounds=2", "eval.samples=0", "eval.start=true"]
    told = run_recipe(causal / "recipe.yaml", words, tmp_path / "run").result
    assert told["final"]["eval_loss"] < told["start"]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "4bit", "8bit"])
def test_clients_over_a_quantised_base_train_together_as_one_by_one(causal: Path, quantize: str) -> None:
    """Oracle 6: clients stacked and sequential, for three rounds of clients with different samples."""
    if quantize != "none":
        pytest.importorskip("bitsandbytes")
    words = [f"model.quantize={quantize}", "federation.clients_per_round=4", "federation.rounds=3"]
    built = assemble(load_recipe(causal / "recipe.yaml", words))
    kinds = {type(module).__name__ for module in built.model.modules()}
    assert ("Linear4bit" in kinds) == (quantize == "4bit")
    ends = []
    for stacked in (4, 1):
        federation = start(built.setup, stacked_clients=stacked)
        for t in range(3):
            chosen = sampling.sample(0, t, built.info.num_clients, built.info.sampled, built.info.tracked)
            run_round(built.setup, federation, *chosen, Plan(stacked))
        ends.append(federation.x)
    moved = ends[1] - built.problem.initial()
    assert moved.norm() > 0.01
    assert (ends[0] - ends[1]).norm() < 1e-5 * moved.norm()


@pytest.mark.slow
def test_every_client_is_evaluated_on_its_own_conversations(causal: Path, tmp_path: Path) -> None:
    """Before and after fine-tuning, by the tokens that it learns; the loss of all is the mean over all tokens."""
    words = ["eval={per_client: 0.25, start: false, by: null, samples: 0}", "local.finetune_steps=4"]
    folder = run_recipe(causal / "recipe.yaml", [*words, "federation.rounds=2"], tmp_path / "run").folder
    clients = json.loads((folder / "client_scores.json").read_text())["clients"]
    assert [each["name"] for each in clients] == sorted(ANIMALS)
    for each in clients:
        for kind in ("scores", "finetuned"):
            assert each[kind]["perplexity"] == pytest.approx(math.exp(each[kind]["eval_loss"]))
        assert each["finetuned"]["eval_loss"] < each["scores"]["eval_loss"], "the response is the client's own act"
