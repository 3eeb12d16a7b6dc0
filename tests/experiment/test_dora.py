"""Runs with DoRA: they learn, plain PEFT gives their scores, and what does not go with DoRA is told before it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_problems import adapted, problem_of
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoConfig

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import UserError
from fedllm.experiment.build import assemble
from fedllm.experiment.run import dry_run


def test_plain_peft_gives_the_outputs_of_a_run(tiny: Path, tmp_path: Path) -> None:
    words = ["lora.dora=true", "lora.dropout=0", "federation.rounds=3"]
    run = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run")
    losses = [line["train_loss"] for line in run.metrics]
    assert losses[-1] < losses[0]
    stored = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    lengths = {name: value for name, value in stored.items() if name.endswith(".lora_magnitude_vector")}
    start = assemble(load_recipe(tiny / "recipe.yaml", words))
    assert len(lengths) == len([name for name in start.problem.space.names if "magnitude" in name]) > 0
    config = AutoConfig.from_pretrained(run.folder / "adapter" / "base_config.json")
    plain = AutoPeftModelForSequenceClassification.from_pretrained(run.folder / "adapter", id2label=config.id2label)
    index = torch.arange(8)
    rows = start.validation.rows(index, pad_id=start.problem.rows.pad_id)
    x = start.problem.space.gather(plain_as_trained(plain))
    with torch.no_grad():
        torch.testing.assert_close(
            start.problem.outputs(x, start.validation)[:8], plain.eval()(**rows).logits, rtol=1e-4, atol=1e-5
        )
    assert not torch.equal(x, start.problem.initial())
    assert "dora true" in (run.folder / "adapter" / "README.md").read_text()


def plain_as_trained(model: torch.nn.Module) -> torch.nn.Module:
    """With its LoRA and head trainable, as in training."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or ".modules_to_save." in name)
    return model


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_packed_rows_are_padded_rows(tmp_path: Path, family: str) -> None:
    """Clients of an unequal number of rows, each with its own lengths."""
    problem = problem_of(adapted(tmp_path, family, rate=0.0, dora=True), pad_id=2 if family == "llama" else 1)
    X = problem.initial() + 0.3 * torch.randn(3, problem.dim, generator=torch.Generator().manual_seed(1))
    assert problem.packed
    assert len(set(problem.rows.sizes([problem.batches.indices(client, 0, 0) for client in range(3)]))) == 3
    found = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    problem.choose_rows(1)
    torch.testing.assert_close(problem.loss_and_gradient(X, [0, 1, 2], 0, 0), found, rtol=1e-4, atol=1e-5)


def test_the_start_is_the_base(tmp_path: Path) -> None:
    with_dora, without = (problem_of(adapted(tmp_path / str(dora), "bert", dora=dora)) for dora in (True, False))
    tokens = without.rows.tokens
    found, expected = (each.outputs(each.initial(), tokens) for each in (with_dora, without))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lora.train=B", r"lora.train: found B with dora=true, expected AB: the lengths of the rows"),
        ("lora.dropout=0.1", r"lora.dropout: found 0.1 with dora=true, expected 0: DoRA would drop the input"),
        (
            "model.quantize=4bit",
            r"lora.dora: found true with model.quantize=4bit, expected none: DoRA reads",
        ),
    ],
)
def test_what_does_not_go_with_it(tiny: Path, change: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(tiny / "recipe.yaml", ["lora.dora=true", "lora.dropout=0", change])


def test_the_plan_names_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", ["lora.dora=true", "lora.dropout=0"]))
    assert "(DoRA rank 2 on query, value" in " ".join(capsys.readouterr().out.split())
