"""Loads a finished run's adapter with plain peft and transformers and compares its scores with result.json's.

python benchmarks/check_adapter.py runs/sst2_fadamgc-s0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import load_recipe
from fedllm.data import load_task
from fedllm.metrics import evaluate_logits


def main(folder: Path) -> int:
    recipe = load_recipe(folder / "recipe.yaml")
    task = load_task(recipe.data, recipe.run.local_hub)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForSequenceClassification.from_pretrained(
        config["base_model_name_or_path"], num_labels=task.num_labels
    )
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    logits = []
    for begin in range(0, len(task.validation), 64):
        texts = [column[begin : begin + 64] for column in task.validation.texts]
        inputs = tokenizer(
            *texts, padding=True, truncation=True, max_length=recipe.data.max_length, return_tensors="pt"
        )
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    found = evaluate_logits(task, torch.cat(logits), task.validation.labels)
    final = json.loads((folder / "result.json").read_text())["final"]
    stated = {name: final[name] for name in found}
    print(f"plain peft: {found}; result.json: {stated}")
    return 0 if found == stated else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
