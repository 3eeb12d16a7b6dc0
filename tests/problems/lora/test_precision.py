"""bfloat16 arithmetic and quantised bases: what is low in precision, and what stays float32 or bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import same_bits
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

from fedllm import load_recipe, run_recipe
from fedllm.data.loading import load_dataset
from fedllm.experiment.build import Job, assemble
from fedllm.federation.local_training import train_together
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.state import FederationState
from fedllm.models.quantization import frozen_size, keep_as_stored

# Five clients together against one at a time, over a quantised base: relative to the change of x in three rounds.
TOLERANCE = 1e-4


def job(tiny: Path, *overrides: str) -> Job:
    return assemble(load_recipe(tiny / "recipe.yaml", overrides))


def trained(built: Job, stacked_clients: int = 5, rounds: int = 3) -> tuple[FederationState, list[float]]:
    federation = start(built.setup, stacked_clients=stacked_clients)
    losses = []
    for t in range(rounds):
        chosen = sample(0, t, built.info.num_clients, built.info.sampled, built.info.tracked)
        report = run_round(built.setup, federation, *chosen, Plan(stacked_clients))
        losses.append(report.train_loss or 0.0)
    return federation, losses


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the base, the scales of quantised weights included."""
    trainable = {name for name, value in model.named_parameters() if value.requires_grad}
    return {name: value.clone() for name, value in model.state_dict().items() if name not in trainable}


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["run.precision=bfloat16", "model.dtype=bfloat16"])
@pytest.mark.slow
def test_bfloat16_stays_close_to_float32_and_all_state_is_float32(tiny: Path, setting: str) -> None:
    exact, low = job(tiny, "run.precision=float32"), job(tiny, "run.precision=float32", setting)
    (reference, _), (federation, losses) = trained(exact), trained(low)
    moved = reference.x - exact.problem.initial()
    away = federation.x - reference.x
    assert 0 < float(away.norm()) < 0.2 * float(moved.norm())
    assert all(loss == loss for loss in losses)
    rows = federation.clients.get(range(8))
    assert {value.dtype for value in (federation.x, *federation.server.values(), *rows.values())} == {torch.float32}
    assert low.problem.outputs(federation.x, low.validation).dtype == torch.float32


@pytest.mark.parametrize("setting", ["run.precision=bfloat16", "model.dtype=bfloat16"])
def test_bfloat16_uploads_and_gradients_are_float32(tiny: Path, setting: str) -> None:
    built = job(tiny, setting)
    federation = start(built.setup)
    found = train_together(built.setup, federation, [0, 1], [1, 1], {0}, lambda active: None)
    assert found.losses is not None
    values = (found.losses, *found.local.values(), *found.uploads.sent.values(), *found.uploads.kept.values())
    assert {value.dtype for value in values} == {torch.float32}


def test_frozen_matrices_are_cast_once_to_the_bits_that_autocast_gives(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = job(tiny, "run.precision=bfloat16")
    monkeypatch.setattr("fedllm.problems.lora.stacked_model.lower", lambda model, dtype: None)
    every = job(tiny, "run.precision=bfloat16")
    X = once.problem.initial() + 0.05 * torch.randn(3, 1, generator=torch.Generator().manual_seed(0))
    ours, theirs = (each.problem.loss_and_gradient(X, [0, 3, 5], 1, 0) for each in (once, every))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    matrices = {name: value.dtype for name, value in once.model.named_parameters() if value.dim() == 2}
    assert {kind for name, kind in matrices.items() if "encoder" in name and "lora" not in name} == {torch.bfloat16}
    assert {kind for name, kind in matrices.items() if "embeddings" in name or "lora" in name} == {torch.float32}


# -- quantised bases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.slow
def test_clients_train_over_an_untouched_quantised_base(tiny: Path, quantize: str, precision: str) -> None:
    pytest.importorskip("bitsandbytes")
    setting = ("algorithm.lr=0.03", f"run.precision={precision}", f"model.quantize={quantize}")
    built = job(tiny, *setting)
    built.problem.outputs(built.problem.initial(), built.validation)
    before = frozen(built.model)
    assert any(value.dtype in (torch.uint8, torch.int8) for value in before.values())
    federation, losses = trained(built, rounds=6)
    assert losses[-1] < 0.8 * losses[0]
    moved = federation.x - built.problem.initial()
    for name, value in built.problem.space.views(moved[None]).items():
        assert bool(value.any()), name
    built.problem.outputs(federation.x, built.validation)
    after = frozen(built.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_8bit_layers_keep_quiet_and_their_rows_apart(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also in eval mode, where on a CPU they take the way that they have on a GPU."""
    bnb = pytest.importorskip("bitsandbytes")
    built = job(tiny, "model.quantize=8bit")
    layer = next(module for module in built.model.modules() if isinstance(module, bnb.nn.Linear8bitLt)).eval()
    row, loud = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    capfd.readouterr()
    assert torch.equal(layer(torch.stack([row, row]))[0], layer(torch.stack([row, 50 * loud]))[0])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.slow
def test_clients_over_a_quantised_base_train_together_as_one_by_one(tiny: Path, quantize: str) -> None:
    pytest.importorskip("bitsandbytes")
    built = job(tiny, f"model.quantize={quantize}", "run.precision=float32")
    (all_, _), (one, _) = trained(built, 5), trained(built, 1)
    moved = float((all_.x - built.problem.initial()).norm())
    assert moved > 0.01
    assert float((one.x - all_.x).norm()) < TOLERANCE * moved


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_quantised_base_computes_with_its_dequantised_weights(tiny: Path, quantize: str) -> None:
    """The logits are those of the float32 base with the same rounded weights put in."""
    bnb = pytest.importorskip("bitsandbytes")
    built, exact = (job(tiny, f"model.quantize={kind}", "run.precision=float32") for kind in (quantize, "none"))
    x = built.problem.initial() + 0.02
    low = built.problem.outputs(x, built.validation)
    rounded = 0
    plain = dict(exact.model.named_modules())
    for name, module in built.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            weight = module.state.CB.float() * module.state.SCB[:, None] / 127
        else:
            continue
        assert float((weight - plain[name].weight).abs().max()) > 0
        plain[name].weight.data.copy_(weight)
        rounded += 1
    assert rounded == 13
    torch.testing.assert_close(exact.problem.outputs(x, exact.validation), low, rtol=1e-4, atol=1e-5)


def test_a_4bit_base_is_counted_in_full_and_weighed_as_it_is(tiny: Path) -> None:
    pytest.importorskip("bitsandbytes")
    built, exact = (job(tiny, f"model.quantize={kind}") for kind in ("4bit", "none"))
    (count, low), (same, full) = (frozen_size(each.model, each.problem.dim) for each in (built, exact))
    assert count == same
    assert full == 4 * same
    linear = 2 * (4 * 32 * 32 + 2 * 32 * 48) + 32 * 32  # weights of two layers and the pooler
    assert full - low == 4 * linear - linear // 2


@pytest.mark.slow
def test_a_4bit_run_resumes_and_its_adapter_loads_in_plain_peft(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    overrides = ["model.quantize=4bit", "run.precision=float32", "run.checkpoint_every=2"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    (cut / "result.json").unlink()
    for later in ("adapter", "checkpoints/000004"):
        shutil.rmtree(cut / later)
    run_recipe(tiny / "recipe.yaml", overrides, cut)
    assert same_bits(whole.folder, cut)

    quantization = BitsAndBytesConfig.from_dict(json.loads((cut / "adapter" / "quantization.json").read_text()))
    base = AutoModelForSequenceClassification.from_pretrained(
        tiny / "bert", num_labels=2, quantization_config=quantization
    )
    keep_as_stored(base)  # the tiny model's layers are too narrow for bitsandbytes' packing on some CPUs
    model = PeftModel.from_pretrained(base, cut / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(cut / "adapter")
    task = load_dataset(load_recipe(tiny / "recipe.yaml").data)
    inputs = tokenizer(task.validation.texts[0], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(1).numpy()
    assert float((predicted == task.validation.labels).mean()) == whole.result["final"]["accuracy"]
