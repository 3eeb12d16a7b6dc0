"""What a run of a causal language model leaves: a plain PEFT adapter, a card whose code works, a merged model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_checkpoints import TEMPLATE, run_causal
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from tiny_gguf import save_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedllm import evaluate_run, export_merged, load_recipe
from fedllm.data.conversations.conversation import USER, Message
from fedllm.data.conversations.prompts import Prompter
from fedllm.experiment.recipe_data import read_data
from fedllm.experiment.trained import load_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_causal(tmp_path_factory.mktemp("causal"))


def run_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """What the card's code leaves and prints, with the folder's path in place."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    assert code.count('"."') == 1
    left: dict[str, Any] = {}
    capsys.readouterr()
    exec(compile(code.replace('"."', repr(str(folder))), "card", "exec"), left)
    return left, capsys.readouterr().out


def asked(run: Path, question: str) -> list[int]:
    trained = load_trained(run)
    return Prompter(trained.backbone.tokenizer, trained.recipe.data).ids([Message(USER, question)])


@torch.no_grad()
def by_hand(model: Any, run: Path) -> dict[str, float]:
    """The scores of the validation split, by a loop over its conversations and labels of our own."""
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    loss, tokens, right, whole, count = 0.0, 0, 0, 0, 0
    for conversation in read_data(load_recipe(run / "recipe.yaml")).validation.conversations:
        question, answer = (message.content for message in conversation.messages)
        messages = [{"role": "system", "content": "be very big"}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=False).input_ids
        learned = tokenizer(f"{answer} </s>", add_special_tokens=False).input_ids
        logits = model(input_ids=torch.tensor([before + learned])).logits[0, len(before) - 1 : -1].float()
        targets = torch.tensor(learned)
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        hits = logits.argmax(-1) == targets
        tokens, right, whole, count = tokens + len(learned), right + int(hits.sum()), whole + int(hits.all()), count + 1
    mean = loss / tokens
    return {
        "eval_loss": mean, "perplexity": math.exp(mean), "token_accuracy": right / tokens, "exact_match": whole / count
    }  # fmt: skip


def test_plain_peft_gives_the_runs_scores(run: Path) -> None:
    """Oracle 7."""
    folder = run / "adapter"
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not names & {"labels.json", "base_config.json", "config.json"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"], config["r"]) == ("CAUSAL_LM", [], 2)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    final = json.loads((run / "result.json").read_text())["final"]
    assert final["token_accuracy"] > 0.1
    base = AutoModelForCausalLM.from_pretrained(run.parent / "llama").eval()
    assert by_hand(base, run)["eval_loss"] > final["eval_loss"] + 0.1
    for model in (PeftModel.from_pretrained(base, folder), AutoPeftModelForCausalLM.from_pretrained(folder)):
        assert by_hand(model.eval(), run) == pytest.approx({name: final[name] for name in final}, rel=1e-5)
    scores = evaluate_run(run).scores
    assert scores == pytest.approx({name: final[name] for name in scores}, rel=1e-5)


def test_the_merged_model_has_the_adapters_logits(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle 7."""
    folder = export_merged(run, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    trained = load_trained(run)
    ids = torch.tensor([asked(run, "red cat sat")])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trained.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert merged.config.use_cache
    assert merged.generation_config.repetition_penalty == 1.3
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    card = ModelCard((folder / "README.md").read_text())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    left, _ = run_code(folder, capsys)
    assert type(left["model"]).__name__ == "LlamaForCausalLM"


def test_the_cards_code_asks_as_in_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (run / "adapter" / "README.md").read_text()
    found = ModelCard(card).data.to_dict()
    assert found["pipeline_tag"] == "text-generation"
    assert found["metrics"][0] == "accuracy"
    for said in (
        "A LoRA adapter, trained by federated learning with fedllm.",
        "| task | text generation; learned: every response of a conversation; template auto |",
        "targets [query, value]; 448 trained values |",
    ):
        assert said in card, said
    left, printed = run_code(run / "adapter", capsys)
    trained = load_trained(run)
    ids = asked(run, "a question")
    assert left["inputs"]["input_ids"].tolist() == [ids]
    with torch.no_grad():
        wanted = trained.model(torch.tensor([ids])).logits
        torch.testing.assert_close(left["model"](torch.tensor([ids])).logits, wanted, atol=1e-5, rtol=1e-5)
    assert printed.strip() != ""


@pytest.mark.slow
def test_gpt2_and_a_template_of_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two adapted parts of GPT-2's fused projection are one adapter of it for PEFT."""
    folder = run_causal(tmp_path, "gpt2", "data.template=alpaca", "data.system=null", "data.max_length=60")
    left, _ = run_code(folder / "adapter", capsys)
    ids = asked(folder, "a question")
    assert left["inputs"]["input_ids"].tolist() == [ids]
    with torch.no_grad():
        wanted = load_trained(folder).model(torch.tensor([ids])).logits
        torch.testing.assert_close(left["model"](torch.tensor([ids])).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_template_of_a_file_goes_with_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = TEMPLATE.replace(" or ", " and ")
    (tmp_path / "own.jinja").write_text(template)
    folder = run_causal(tmp_path, "llama", f"data.template={tmp_path / 'own.jinja'}", "federation.rounds=1")
    assert AutoTokenizer.from_pretrained(folder / "adapter").chat_template == template
    left, _ = run_code(folder / "adapter", capsys)
    assert left["inputs"]["input_ids"].tolist() == [asked(folder, "a question")]
    assert str(tmp_path) not in (folder / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("quantize", ["none", pytest.param("4bit", marks=pytest.mark.slow)])
def test_a_base_that_is_a_gguf_file(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle 6: the base that the card's code makes of quantization.json gives the same perplexity."""
    if quantize != "none":
        modules = pytest.importorskip("bitsandbytes.nn.modules")
        # On a CPU with bfloat16 instructions plain bitsandbytes rounds the scales, and fails for a layer of this width.
        monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = save_gguf(tmp_path / "base" / "tiny.gguf")
    words = [f"model.name={file}", f"model.quantize={quantize}", "federation.rounds=1", "data.max_length=60"]
    folder = run_causal(tmp_path, "llama", *words)
    monkeypatch.chdir(tmp_path)
    left, _ = run_code(folder / "adapter", capsys)
    ids = torch.tensor([asked(folder, "the cat")])
    with torch.no_grad():
        torch.testing.assert_close(
            left["model"](ids).logits, load_trained(folder).model(ids).logits, atol=1e-4, rtol=1e-4
        )
    final = json.loads((folder / "result.json").read_text())["final"]
    assert evaluate_run(folder).scores["perplexity"] == pytest.approx(final["perplexity"], rel=1e-4)
