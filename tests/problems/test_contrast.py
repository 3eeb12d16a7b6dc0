"""MOON's contrast: against its formula on plain models, and however the work is cut; who refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_models import Pixels, bert, cross_entropy, full_problem, gpt2, resnet, small_net, tokens
from lora_problems import adapted, problem_of
from tiny_images import CLASSES, SIDE, pixels, save_model
from torch import Tensor, nn

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.algorithms.base import Contrast
from fedllm.common.errors import UserError
from fedllm.data.client_batches import ClientBatches
from fedllm.models.loading import load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.problems.model_problem import ModelProblem
from fedllm.tasks.heads import image_head

CLIENTS = [0, 1, 2]


def drawn(problem: ModelProblem, clients: int = 3) -> tuple[Tensor, Contrast]:
    """Rows of parameters of the clients' models, and two other models for each."""
    draw = torch.Generator().manual_seed(1)
    rows = problem.initial() + 0.1 * torch.randn(3, clients, problem.dim, generator=draw)
    return rows[0], Contrast(rows[1], rows[2], weight=3.0, temperature=0.5)


def by_hand(z: Tensor, near: Tensor, far: Tensor, contrast: Contrast) -> Tensor:
    """The mean over the samples of the term, as the paper writes it (eq. 3)."""
    similar = [torch.cosine_similarity(z, other, dim=1) / contrast.temperature for other in (near, far)]
    drawn_to, pushed_from = (value.exp() for value in similar)
    return contrast.weight * -(drawn_to / (drawn_to + pushed_from)).log().mean()


def last_tokens(model: Any, rows: dict[str, Tensor]) -> Tensor:
    hidden = model.transformer(**rows).last_hidden_state
    return hidden[torch.arange(len(hidden)), rows["attention_mask"].sum(dim=1) - 1]


READ: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "bert": lambda model, rows: model.bert(**rows).pooler_output,
    "roberta": lambda model, rows: model.classifier.dense(model.roberta(**rows).last_hidden_state[:, 0]).tanh(),
    "distilbert": lambda model, rows: model.pre_classifier(model.distilbert(**rows).last_hidden_state[:, 0]).relu(),
    "gpt2": last_tokens,
    "vit": lambda model, rows: model.vit(**rows).last_hidden_state[:, 0],
    "small": lambda model, rows: model.norm(model.convolution(rows["pixel_values"])).relu().flatten(1),
}


def assert_is_the_formula(problem: ModelProblem, model: nn.Module, base: Any, family: str, **pad: int) -> None:
    """Losses and gradients of three clients are those of the plain model under autograd. pad: the id of padding."""
    X, contrast = drawn(problem)
    losses, gradients = problem.contrastive_gradient(X, contrast, CLIENTS, 0, 0)
    problem.release()
    names = set(problem.space.names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    for client in CLIENTS:
        index = torch.from_numpy(problem.batches.indices(client, 0, 0))
        rows, targets = problem.samples.rows(index, **pad), problem.samples.targets[index]
        others = []
        for x in (contrast.near[client], contrast.far[client]):
            problem.space.scatter(model, x)
            others.append(READ[family](base, rows).detach())
        problem.space.scatter(model, X[client])
        model.zero_grad()
        loss = cross_entropy(model(**rows).logits, targets).mean()
        loss = loss + by_hand(READ[family](base, rows), *others, contrast)
        loss.backward()
        alone = torch.cat([p.grad.reshape(-1) for name, p in model.named_parameters() if name in names])
        torch.testing.assert_close(losses[client], loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[client], alone, rtol=1e-3, atol=2e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("slices", [None, 2], ids=["packed", "padded"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2"])
def test_adapters_of_text_models(tmp_path: Path, family: str, slices: int | None) -> None:
    model = adapted(tmp_path, family, rate=0.0)
    pad = {"pad_id": 2} if family == "gpt2" else {}
    problem = problem_of(model, slices=slices, **pad)
    assert problem.packed == (slices is None)
    assert_is_the_formula(problem, model, model.get_base_model(), family, **pad)


def image_problem(folder: Path) -> tuple[LoraProblem, Any]:
    model = ModelSettings(name=save_model(folder, "vit", hidden_dropout_prob=0.0))
    backbone = load_backbone(model, image_head(CLASSES, SIDE))
    model = attach_lora(backbone, LoraSettings(rank=2, alpha=4, targets=["query", "value"]))
    batches = ClientBatches(
        [np.arange(0, 4), np.arange(4, 7), np.arange(7, 12)], batch_size=5, epochs=1, steps=None, seed=0
    )
    return LoraProblem(model, pixels(12), batches, cross_entropy, EngineSettings()), model


def test_adapters_of_image_models(tmp_path: Path) -> None:
    problem, model = image_problem(tmp_path)
    assert_is_the_formula(problem, model, model.get_base_model(), "vit")


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("family", ["bert", "small"])
def test_all_weights(family: str, stacked: bool) -> None:
    model, samples = (bert(), tokens()) if family == "bert" else (small_net(norm=False), Pixels.draw(10))
    problem = full_problem(model, samples, clients=3, stacked=stacked)
    assert_is_the_formula(problem, model, model, family)


@pytest.mark.parametrize("kind", ["adapters", "all weights"])
def test_the_three_models_drop_the_same(tmp_path: Path, kind: str) -> None:
    """Where they are one model, the term is the logarithm of 2, and the gradient is that of the loss."""
    if kind == "adapters":
        problem: ModelProblem = problem_of(adapted(tmp_path, "bert", rate=0.3))
    else:
        problem = full_problem(bert(dropout=0.3), tokens(), clients=3)
    X, contrast = drawn(problem)
    losses, gradients = problem.loss_and_gradient(X, CLIENTS, 2, 0)
    same = replace(contrast, near=X, far=X)
    more, steeper = problem.contrastive_gradient(X, same, CLIENTS, 2, 0)
    torch.testing.assert_close(more, losses + 3.0 * torch.tensor(2.0).log())
    torch.testing.assert_close(steeper, gradients, rtol=1e-5, atol=1e-6 * float(gradients.abs().max()))
    without, plain = problem.contrastive_gradient(X, replace(contrast, weight=0.0), CLIENTS, 2, 0)
    torch.testing.assert_close((without, plain), (losses, gradients))
    assert torch.equal(problem.loss_and_gradient(X, CLIENTS, 2, 0)[1], gradients), "nothing stays in the model"


@pytest.mark.parametrize("kind", ["adapters", "all weights"])
def test_clients_alone_get_what_they_get_together(tmp_path: Path, kind: str) -> None:
    if kind == "adapters":
        problem: ModelProblem = problem_of(adapted(tmp_path, "bert", rate=0.3), checkpointing=True)
    else:
        problem = full_problem(bert(dropout=0.3), tokens(), clients=3)
    X, contrast = drawn(problem)
    losses, gradients = problem.contrastive_gradient(X, contrast, CLIENTS, 2, 0)
    for client in CLIENTS:
        one = slice(client, client + 1)
        alone = problem.contrastive_gradient(X[one], contrast.rows(one), [client], 2, 0)
        torch.testing.assert_close(alone, (losses[one], gradients[one]), rtol=1e-4, atol=1e-5)


def test_no_weight_is_fedavg() -> None:
    problem = QuadraticProblem.random(5, 4, spread=2.0, noise=0.1)
    runs = [
        simulate(load_algorithm(name, lr=0.1, **keys), problem, rounds=4, local_steps=3, clients_per_round=3)
        for name, keys in (("fedavg", {}), ("moon", {"mu": 0}), ("moon", {}))
    ]
    assert torch.equal(runs[0].history, runs[1].history)
    assert not torch.allclose(runs[0].history, runs[2].history)


class Squared(nn.Module):
    """A model whose outputs are not those of its last Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(3 * 64, 3)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.classifier(pixel_values.flatten(1)) ** 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: full_problem(gpt2(), tokens(learned=True)), "MOON: found a causal language model, expected a classif"),
        (lambda: full_problem(resnet(), Pixels.draw(10)), "has running statistics"),
        (lambda: full_problem(Squared(), Pixels.draw(10)), "Squared: its 3 outputs are not those of a Linear layer"),
    ],
)
def test_problems_without_representations_are_refused(make: Callable[[], ModelProblem], said: str) -> None:
    with pytest.raises(UserError, match=said):
        simulate(load_algorithm("moon"), make(), rounds=1, local_steps=4)
