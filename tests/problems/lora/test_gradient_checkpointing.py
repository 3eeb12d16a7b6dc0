"""Gradient checkpointing: the same bits from fewer kept bytes, in all families, packed and padded, with dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import same_bits
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, save_tiny
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import UserError
from fedllm.experiment.build import Job, assemble
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.lora.dropout import row_keys
from fedllm.problems.lora.stacked_model import StackedModel
from fedllm.problems.lora.stacked_modules import CheckpointedBlock


def job(tiny: Path, name: str, *overrides: str) -> Job:
    words = [f"model.name={name}", "lora.dropout=0.1", "run.threads=1", *overrides]
    return assemble(load_recipe(tiny / "recipe.yaml", words))


def step(job: Job) -> tuple[Tensor, Tensor]:
    x = job.problem.initial()
    X = x + 0.1 * torch.randn(3, len(x), generator=torch.Generator().manual_seed(0))
    return job.problem.loss_and_gradient(X, [0, 1, 2], 0, 0)


@pytest.mark.parametrize("targets", ["[query, value]", "all-linear"])
@pytest.mark.parametrize("slices", ["auto", "2"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_the_same_bits_from_fewer_bytes(tiny: Path, tmp_path: Path, family: str, slices: str, targets: str) -> None:
    name = save_tiny(tmp_path / family, family)
    settings = (f"run.slices={slices}", f"lora.targets={targets}")
    plain = job(tiny, name, *settings)
    loss, gradient = step(plain)
    kept = plain.problem.token_bytes
    plain.problem.release()
    saving = job(tiny, name, *settings, "run.gradient_checkpointing=true")
    runs = counted(saving.model)
    same_loss, same_gradient = step(saving)
    assert torch.equal(loss, same_loss)
    assert torch.equal(gradient, same_gradient)
    assert runs
    assert all(count % 2 == 0 and count for count in runs.values()), "forward, and again in the backward pass"
    assert saving.problem.token_bytes < kept
    before = dict(runs)
    saving.problem.outputs(saving.problem.initial(), saving.validation)
    assert all(runs[name] > before[name] for name in runs)


def counted(model: nn.Module) -> dict[str, int]:
    """How often each block's attention has run."""
    runs: dict[str, int] = {}
    for name, block in model.named_modules():
        if isinstance(block, CheckpointedBlock):
            inner = next(iter(block.children()))
            runs[name] = 0
            inner.register_forward_hook(lambda *_, name=name: runs.__setitem__(name, runs[name] + 1))
    return runs


def test_a_block_that_a_pass_goes_through_twice_drops_as_it_did() -> None:
    """Its second mask is another one than its first, and each comes again in the backward pass."""
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    base = BertForSequenceClassification(config)
    base.bert.encoder.layer[1] = base.bert.encoder.layer[0]
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    space = ParameterSpace.of(model)
    stacked = StackedModel(model.eval(), space)
    inputs = {"input_ids": torch.arange(24).remainder(20).view(4, 6)}
    keys = row_keys(0, 0, 0, [0, 1], torch.arange(2).repeat(2, 1))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            assert stacked.checkpoint_blocks() == 1
        X = space.gather(model).repeat(2, 1).requires_grad_()
        stacked(X, inputs, keys).square().sum().backward()
        gradients.append(X.grad)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_a_run_with_it_is_the_run_without(tiny: Path, tmp_path: Path) -> None:
    whole = run_recipe(tiny / "recipe.yaml", ["run.threads=1"], tmp_path / "whole")
    saving = run_recipe(tiny / "recipe.yaml", ["run.threads=1", "run.gradient_checkpointing=true"], tmp_path / "saving")
    assert same_bits(whole.folder, saving.folder)


def test_a_model_without_blocks_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedllm.problems.lora.stacked_model.outermost_blocks", lambda model: [])
    with pytest.raises(UserError, match=r"run.gradient_checkpointing: Bert\w+ has no layers that .* run.slices"):
        assemble(load_recipe(tiny / "recipe.yaml", ["run.gradient_checkpointing=true"]))
