"""`lora.train: B`: A stays as drawn, and the mean of the clients' B is the mean of their updates B A."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters import adapter, same_bits
from jobs import job
from tiny_models import save_tiny
from transformers import AutoModelForSequenceClassification

from fedllm import load_recipe, run_recipe
from fedllm.experiment.build import assemble
from fedllm.federation.local_training import train_part
from fedllm.federation.rounds import start

B_ALONE = "lora.train=B"
ALGORITHM = "algorithm={name: fedadamw, lr: 1.0e-2}"


def test_only_b_and_the_head_are_trained_and_a_is_that_of_another_run(tiny: Path) -> None:
    both, alone = job(tiny, ALGORITHM), job(tiny, ALGORITHM, B_ALONE)
    names = alone.problem.space.names
    assert [name for name in both.problem.space.names if ".lora_A." not in name] == list(names)
    assert any(".lora_B." in name for name in names)
    values, others = dict(both.model.named_parameters()), dict(alone.model.named_parameters())
    assert all(torch.equal(values[name], others[name]) for name in values)
    assert alone.info.blocks.dim == alone.problem.dim


def test_the_mean_of_the_updates_is_the_update_of_the_mean(tiny: Path) -> None:
    """FFA-LoRA (Sun et al. 2024), section 4: mean(B_i A) = mean(B_i) A."""
    built = job(tiny, ALGORITHM, B_ALONE)
    state, clients = start(built.setup), [0, 1, 2]
    rows = [
        train_part(built.setup, state, {client: 2}, {client}, 1, lambda _: None).reduction.sums["d"]
        for client in clients
    ]
    space, frozen = built.problem.space, dict(built.model.named_parameters())
    moved = [space.views((state.x + d).float()[None]) for d in rows]
    mean = space.views((state.x + torch.stack(rows).mean(0)).float()[None])
    layers = [name for name in space.names if ".lora_B." in name]
    assert layers
    for name in layers:
        A = frozen[name.replace(".lora_B.", ".lora_A.")]
        mean_of_products = torch.stack([views[name][0] @ A for views in moved]).mean(0)
        assert float(mean_of_products.norm()) > 0
        torch.testing.assert_close(mean[name][0] @ A, mean_of_products, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["run.gradient_checkpointing=true"], ["model.quantize=4bit"]])
def test_a_run_has_the_frozen_a_in_its_adapter(tiny: Path, tmp_path: Path, settings: list[str]) -> None:
    from peft import PeftModel

    name = save_tiny(tmp_path / "llama", "llama")
    overrides = [f"model.name={name}", ALGORITHM, B_ALONE, *settings]
    if "model.quantize=4bit" in settings:
        pytest.importorskip("bitsandbytes")
    done = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    start_values = dict(assemble(load_recipe(tiny / "recipe.yaml", overrides)).model.named_parameters())
    stored = adapter(done.folder)
    moved = 0
    for key, value in stored.items():
        if ".lora_A." in key:
            assert torch.equal(value, start_values[key.replace(".weight", ".default.weight")].cpu())
        elif ".lora_B." in key:
            moved += int(value.any())
    assert moved > 0
    base = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    loaded = PeftModel.from_pretrained(base, done.folder / "adapter")
    assert not loaded.training
    again = run_recipe(tiny / "recipe.yaml", [*overrides, "run.stacked_clients=1"], tmp_path / "again")
    if not settings:
        close = adapter(again.folder)
        assert all(torch.allclose(value, close[key], rtol=1e-3, atol=1e-5) for key, value in stored.items())
    same = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "same")
    assert same_bits(done.folder, same.folder)


def test_half_the_values_are_sent(tiny: Path) -> None:
    both, alone = job(tiny, ALGORITHM), job(tiny, ALGORITHM, B_ALONE)
    lora = [space.dim - _head(space) for space in (both.problem.space, alone.problem.space)]
    assert lora[1] == lora[0] / 2


def _head(space: object) -> int:
    pairs = zip(space.names, space.sizes, strict=True)  # type: ignore[attr-defined]
    return sum(size for name, size in pairs if ".lora_" not in name)


def test_a_site_with_another_frozen_a_is_refused(tiny: Path) -> None:
    from fedllm.models.fingerprint import fingerprint

    built = job(tiny, ALGORITHM, B_ALONE)
    before = fingerprint(built.model)
    name, value = next((n, p) for n, p in built.model.named_parameters() if ".lora_A." in n)
    with torch.no_grad():
        value.mul_(1.5)
    assert fingerprint(built.model) != before, name
    assert replace(built.info, model=before) != replace(built.info, model=fingerprint(built.model))
