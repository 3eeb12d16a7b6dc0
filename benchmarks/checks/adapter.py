"""Scores a finished run's adapter with plain peft and transformers, and compares the scores with its result.json.

python -m benchmarks.checks.adapter runs/sst2_fadamgc-s0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import load_recipe
from fedllm.data.loading import load_dataset
from fedllm.tasks.selection import task_of


def main(folder: Path) -> int:
    recipe = load_recipe(folder / "recipe.yaml")
    data = load_dataset(recipe.data, recipe.run.local_hub)
    task = task_of(recipe.data, data.classes)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForSequenceClassification.from_pretrained(config["base_model_name_or_path"], **task.head.config)
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    logits = []
    for begin in range(0, len(data.validation), 64):
        texts = [column[begin : begin + 64] for column in data.validation.texts]
        inputs = tokenizer(
            *texts, padding=True, truncation=True, max_length=recipe.data.max_length, return_tensors="pt"
        )
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    scores = task.evaluate(torch.cat(logits), torch.from_numpy(data.validation.labels))
    final = json.loads((folder / "result.json").read_text())["final"]
    found, stated = ({name: values[name] for name in task.metric_names} for values in (scores, final))
    print(f"plain peft: {found}; result.json: {stated}")
    return 0 if found == stated else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
