"""LoRA on every linear layer of the blocks, in a run that is cut off, resumed and exported, and at a site."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from adapters import adapter, same_bits
from jobs import batches, job
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import save_tiny
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import load_recipe, run_recipe
from fedllm.client import Broadcast, Client
from fedllm.data.loading import load_dataset
from fedllm.experiment.export import export_adapter
from fedllm.federation.rounds import Plan, run_round, start

ALGORITHM = "algorithm={name: fedadamw, lr: 1.0e-2}"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.slow
def test_a_run_resumes_and_its_adapter_loads_in_plain_peft(tiny: Path, tmp_path: Path, family: str) -> None:
    name = save_tiny(tmp_path / family, family)
    overrides = [f"model.name={name}", "lora.targets=all-linear", ALGORITHM, "run.checkpoint_every=2"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "whole")
    assert yaml.safe_load((whole.folder / "recipe.yaml").read_text())["lora"]["targets"] == ["all-linear"]
    cut = Path(shutil.copytree(whole.folder, tmp_path / "cut"))
    (cut / "result.json").unlink()
    for later in ("adapter", "checkpoints/000004"):
        shutil.rmtree(cut / later)
    as_a_list = [*overrides, "lora.targets=[all-linear]"]
    run_recipe(tiny / "recipe.yaml", as_a_list, cut)
    assert same_bits(whole.folder, cut)
    exported = load_file(export_adapter(cut, tmp_path / "exported") / "adapter_model.safetensors")
    assert all(torch.equal(exported[key], value) for key, value in adapter(cut).items())

    base = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(cut / "adapter")
    base.config.pad_token_id = tokenizer.pad_token_id
    model = PeftModel.from_pretrained(base, cut / "adapter").eval()
    held_out = load_dataset(load_recipe(tiny / "recipe.yaml").data).validation
    inputs = tokenizer(held_out.texts[0], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(1).numpy()
    assert float((predicted == held_out.labels).mean()) == whole.result["final"]["accuracy"]


def test_a_sites_client_sends_what_the_round_loop_computes(tiny: Path) -> None:
    """With a plain PEFT model of its own, and the block means of FedAdamW."""
    built = job(tiny, ALGORITHM, "lora.targets=all-linear", "lora.dropout=0", "model.dropout=0")
    federation = start(built.setup, stacked_clients=2)
    run_round(built.setup, federation, [0, 1, 2], [0, 1, 2], Plan(2))
    x, server = federation.x.clone(), dict(federation.server)
    run_round(replace(built.setup, info=built.info), federation, [1], [1], Plan(1))
    expected = (federation.x - x) / built.algorithm.server_lr
    built.problem.release()
    site = Client(built.model.eval(), built.algorithm, built.info)
    upload = site.fit(Broadcast(1, x, server), batches(built, 1, 1))
    torch.testing.assert_close(upload["d"][0], expected, rtol=1e-4, atol=2e-6)
