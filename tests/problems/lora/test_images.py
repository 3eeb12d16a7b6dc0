"""LoRA on ViT and Swin: clients together compute what a plain PEFT model computes for each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_problems import cross_entropy
from tiny_images import CLASSES, SIDE, pixels, save_model

from fedllm.data.client_batches import ClientBatches
from fedllm.data.pixels import Pixels
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.heads import image_head

FAMILIES = ["vit", "swin"]


def adapted(folder: Path, family: str, rate: float = 0.0, dropout: float = 0.0) -> Any:
    model = ModelSettings(name=save_model(folder, family, hidden_dropout_prob=rate))
    backbone = load_backbone(model, image_head(CLASSES, SIDE))
    return attach_lora(backbone, LoraSettings(rank=2, alpha=4, dropout=dropout, targets=["query", "value", "mlp"]))


def problem_of(model: Any, samples: Pixels, **settings: Any) -> LoraProblem:
    """Three clients of 4, 3 and 5 samples."""
    parts = [np.arange(0, 4), np.arange(4, 7), np.arange(7, 12)]
    batches = ClientBatches(parts, batch_size=5, epochs=1, steps=None, seed=0)
    return LoraProblem(model, samples, batches, cross_entropy, EngineSettings(**settings))


def rows_of(problem: LoraProblem) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return problem.initial() + 0.1 * torch.randn(3, problem.dim, generator=draw)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_clients_together_are_plain_peft_loops(tmp_path: Path, family: str, checkpointing: bool) -> None:
    samples, model = pixels(12), adapted(tmp_path, family)
    problem = problem_of(model, samples, checkpointing=checkpointing)
    assert not problem.packed
    X = rows_of(problem)
    losses, gradients = problem.loss_and_gradient(X, [0, 1, 2], 0, 0)
    problem.release()
    space = problem.space
    names = set(space.names)
    for client in range(3):
        space.scatter(model, X[client])
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        index = torch.from_numpy(problem.batches.indices(client, 0, 0))
        loss = cross_entropy(model(**samples.rows(index)).logits, samples.targets[index]).mean()
        loss.backward()
        alone = torch.cat([p.grad.reshape(-1) for name, p in model.named_parameters() if name in names])
        torch.testing.assert_close(losses[client], loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[client], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_clients_together_over_a_quantised_base_are_those_alone(tmp_path: Path, family: str, quantize: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = ModelSettings(name=save_model(tmp_path, family), quantize=quantize)
    backbone = load_backbone(model, image_head(CLASSES, SIDE))
    problem = problem_of(attach_lora(backbone, LoraSettings(rank=2, targets=["query", "value"])), pixels(12))
    X = rows_of(problem)
    together = problem.gradient(X, [0, 1, 2], 0, 0)
    for client in range(3):
        alone = problem.gradient(X[client : client + 1], [client], 0, 0)[0]
        assert float(alone.norm()) > 0
        assert float((together[client] - alone).norm()) < 1e-3 * float(alone.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_and_augmentation_do_not_depend_on_who_trains_together(tmp_path: Path, family: str) -> None:
    problem = problem_of(adapted(tmp_path, family, rate=0.2, dropout=0.2), pixels(12, augment=True))
    X = rows_of(problem)
    together = problem.gradient(X, [0, 1, 2], 3, 0)
    for client in range(3):
        alone = problem.gradient(X[client : client + 1], [client], 3, 0)[0]
        torch.testing.assert_close(together[client], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))
    problem.choose_rows(2)
    torch.testing.assert_close(problem.gradient(X, [0, 1, 2], 3, 0), together, rtol=1e-3, atol=1e-5)
    other = problem.gradient(X, [0, 1, 2], 4, 0)
    assert float((other - together).norm() / together.norm()) > 0.05, "another round draws others"


def test_each_source_of_chance_changes_the_gradient(tmp_path: Path) -> None:
    """The model's dropout, the adapters' and augmentation, each alone."""
    plain = problem_of(adapted(tmp_path / "plain", "swin"), pixels(12))
    X = rows_of(plain)
    before = plain.gradient(X, [0, 1, 2], 0, 0)
    for name, rate, dropout, augment in (
        ("model", 0.2, 0.0, False),
        ("lora", 0.0, 0.2, False),
        ("crop", 0.0, 0.0, True),
    ):
        problem = problem_of(adapted(tmp_path / name, "swin", rate, dropout), pixels(12, augment=augment))
        assert torch.equal(problem.initial(), plain.initial())
        found = problem.gradient(X, [0, 1, 2], 0, 0)
        assert float((found - before).norm() / before.norm()) > 0.02, name
        evaluated = [each.outputs(X[0], pixels(6, seed=5)) for each in (problem, plain)]
        assert torch.equal(*evaluated), "no chance in an evaluation"


def test_an_evaluation_gives_the_plain_models_outputs(tmp_path: Path) -> None:
    model = adapted(tmp_path, "vit")
    problem, samples = problem_of(model, pixels(12)), pixels(7, seed=3)
    x = rows_of(problem)[0]
    found = problem.outputs(x, samples)
    problem.release()
    problem.space.scatter(model, x)
    with torch.no_grad():
        expected = model(**samples.rows(torch.arange(7))).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
