"""A run with rsLoRA is that of plain LoRA whose alpha is larger by the root of the rank, in every number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedllm import load_recipe, run_recipe
from fedllm.experiment.run import dry_run

TIMES = ("seconds", "simulated_seconds", "eval_seconds")


@pytest.mark.slow
@pytest.mark.parametrize("train", ["AB", "turns"])
def test_a_run_has_the_bits_of_plain_lora_with_the_same_scale(tiny: Path, tmp_path: Path, train: str) -> None:
    words = ["lora.rank=4", f"lora.train={train}", "federation.rounds=2"]
    runs = [
        run_recipe(tiny / "recipe.yaml", [*words, *more], tmp_path / name)
        for name, more in (("plain", ["lora.alpha=8"]), ("rslora", ["lora.alpha=4", "lora.scaling=rslora"]))
    ]
    plain, found = ([{k: v for k, v in line.items() if k not in TIMES} for line in run.metrics] for run in runs)
    assert plain == found
    stored = [load_file(run.folder / "adapter" / "adapter_model.safetensors") for run in runs]
    assert all(value.equal(stored[1][name]) for name, value in stored[0].items())
    configs = [json.loads((run.folder / "adapter" / "adapter_config.json").read_text()) for run in runs]
    assert [(config["lora_alpha"], config["use_rslora"]) for config in configs] == [(8.0, False), (4.0, True)]
    assert "scaling rslora" in (runs[1].folder / "adapter" / "README.md").read_text()


def test_the_plan_names_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", ["lora.scaling=rslora"]))
    assert "(LoRA rank 2, rslora, on query, value" in " ".join(capsys.readouterr().out.split())
