"""Training all weights: against torch.optim on the plain model, by hand, and however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from full_models import Pixels, bert, cross_entropy, full_problem, gpt2, resnet, small_net, tokens
from torch import Tensor, nn

from fedllm import load_algorithm, simulate
from fedllm.algorithms import algorithm_names
from fedllm.common.errors import UserError
from fedllm.data.client_batches import ClientBatches
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.models.norms import apply_norm
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.full.settings import FullSettings
from fedllm.problems.full.stacked_step import require_stackable

STEPS = 5
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet": lambda: (resnet(), Pixels.draw(12)),
    "bert": lambda: (bert(), tokens()),
    "gpt2": lambda: (gpt2(), tokens(learned=True)),
}


def plain_loss(model: nn.Module, samples: Any, index: np.ndarray) -> Tensor:
    """The mean loss of a batch as transformers computes it, from labels."""
    rows = samples.rows(torch.from_numpy(index))
    if getattr(samples, "learned", None) is None:
        return F.cross_entropy(model(**rows).logits, samples.targets[torch.from_numpy(index)])
    labels = torch.full_like(rows["input_ids"], -100)
    for row, sample in enumerate(index):
        begin, end = samples.offsets[sample], samples.offsets[sample + 1]
        ids, learned = samples.input_ids[begin:end].long(), samples.learned[begin:end]
        labels[row, : end - begin] = ids.where(learned, -100)
    return model(**rows, labels=labels).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (load_algorithm("fedavg", lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            load_algorithm("localadamw", lr=0.01, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["SGD", "AdamW"],
)
def test_one_client_with_all_data_is_torch_optim(name: str, algorithm: Any, optimizer: Any) -> None:
    model, samples = MODELS[name]()
    problem = full_problem(model, samples, clients=1, batch_size=4, steps=STEPS)
    found = simulate(algorithm, problem, rounds=1, local_steps=STEPS, progress=False)

    plain, _ = MODELS[name]()
    step, plain = optimizer(plain.parameters()), plain.train()
    for k in range(STEPS):
        step.zero_grad()
        plain_loss(plain, samples, problem.batches.indices(0, 0, k)).backward()
        step.step()
    expected = ParameterSpace.of(plain).gather(plain)
    # A large eps, as a key's bias has a gradient of rounding errors alone, which Adam would make a step of.
    assert (found.x - expected).abs().max() < 2e-5
    assert (expected - problem.initial()).abs().max() > 1e-2
    if name == "resnet":
        assert found.buffers is not None
        values = dict(plain.named_buffers())
        assert torch.allclose(
            found.buffers, torch.cat([values[n].flatten() for n in problem.model.buffers.names]), atol=1e-5
        )


@pytest.mark.parametrize("model", [lambda: bert(0.3), lambda: small_net(rate=0.5)], ids=["bert", "net"])
def test_dropout_is_a_function_of_seed_round_step_and_client(model: Callable[[], nn.Module]) -> None:
    net = model()
    samples = tokens() if hasattr(net, "bert") else Pixels.draw(10)
    problem = full_problem(net, samples)
    X = problem.initial().repeat(2, 1)
    torch.manual_seed(11)
    both = problem.gradient(X, [0, 1], 0, 0)
    after = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(1))  # the global generator stays
    assert torch.equal(problem.gradient(X[:1], [1], 0, 0)[0], both[1])
    assert torch.equal(problem.gradient(X[:1], [0], 0, 0)[0], both[0])
    batches = problem.batches
    same = ClientBatches([batches.parts[0]] * 2, batch_size=5, epochs=1, steps=None, seed=0)
    same._permutation = lambda client, round, epoch: batches.parts[0]  # type: ignore[method-assign]
    alike = FullProblem(net, samples, same, cross_entropy)
    gradients = alike.gradient(X, [0, 1], 0, 0)
    assert not torch.allclose(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], alike.gradient(X[:1], [0], 1, 0)[0])


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_batches_cut_by_memory_have_the_same_losses_and_gradients(name: str) -> None:
    model, samples = MODELS[name]()
    whole = full_problem(model, samples, clients=1, batch_size=8)
    X = whole.initial()[None]
    cut = full_problem(model, samples, clients=1, batch_size=8, pass_bytes=15 * whole.passes.memory.token)
    assert len(cut._cut(np.arange(8))) >= 4
    (loss,), (gradient,) = whole.loss_and_gradient(X, [0], 0, 0)
    (other,), (found,) = cut.loss_and_gradient(X, [0], 0, 0)
    assert abs(loss - other) < 1e-6
    assert (gradient - found).norm() < 1e-6 * gradient.norm()
    assert torch.allclose(whole.outputs(X[0], samples), cut.outputs(X[0], samples), atol=1e-5)


def test_augmentation_is_drawn_by_the_place_in_the_batch_however_it_is_cut() -> None:
    samples = Pixels(Pixels.draw(12).values, augment=True)
    whole = full_problem(small_net(norm=False), samples)
    X = whole.initial().repeat(2, 1)
    expected = whole.gradient(X, [0, 1], 0, 0)
    token = whole.passes.memory.token
    for options in ({"pass_bytes": 64 * token}, {"stacked": True}):
        assert torch.allclose(
            full_problem(small_net(norm=False), samples, **options).gradient(X, [0, 1], 0, 0), expected
        )
    plain = full_problem(small_net(norm=False), Pixels.draw(12)).gradient(X, [0, 1], 0, 0)
    assert not torch.allclose(plain, expected)
    assert torch.equal(whole.outputs(X[0], samples), whole.outputs(X[0], Pixels.draw(12)))


def test_batch_norm_takes_a_batch_whole() -> None:
    problem = full_problem(small_net(), Pixels.draw(8), pass_bytes=1.0)
    assert [len(part) for part in problem._cut(np.arange(5))] == [5]


@pytest.mark.parametrize("name", ["bert", "gpt2", "net", "resnet"])
def test_stacked_clients_equal_sequential_ones(name: str) -> None:
    """Clients of different batch sizes and lengths, in passes of all and of two."""
    model, samples = MODELS[name]() if name in MODELS else (small_net(norm=False), Pixels.draw(10))
    if name == "resnet":
        apply_norm(model, "group", name)
        samples = Pixels.draw(12, side=32)  # of smaller ones the last norm is over two values, and ill-conditioned
    alone = full_problem(model, samples, clients=4)
    draw = torch.Generator().manual_seed(5)
    X = alone.initial() + 0.01 * torch.randn(4, alone.dim, generator=draw)
    losses, gradients = alone.loss_and_gradient(X, [2, 0, 3, 1], 0, 0)
    for clients in (4, 2):
        token = alone.passes.memory.token
        together = full_problem(
            model, samples, clients=4, stacked=True, pass_bytes=clients * 3 * int(samples.lengths.max()) * token
        )
        found, rows = together.loss_and_gradient(X, [2, 0, 3, 1], 0, 0)
        assert (found - losses).abs().max() < 1e-6
        assert (rows - gradients).norm() < 1e-6 * gradients.norm() + 1e-9
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("model", "samples", "why"),
    [
        (small_net, Pixels.draw(6), "has batch norm, which mixes stacked clients; train one after the other"),
        (lambda: bert(0.1), tokens(), "cannot train stacked clients .*random.*run.stacked_clients=1"),
    ],
)
def test_models_that_cannot_be_stacked_are_refused(model: Callable[[], nn.Module], samples: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        full_problem(model(), samples, stacked=True)


def test_full_gradients_are_those_of_the_mean_loss_without_dropout() -> None:
    model, samples = bert(0.3), tokens()
    problem = full_problem(model, samples, clients=2, batch_size=2)
    found = problem.full_gradient(problem.initial(), [1, 0])
    plain = bert().eval()
    for row, client in enumerate((1, 0)):
        plain.zero_grad()
        plain_loss(plain, samples, problem.batches.parts[client]).backward()
        expected = problem.space.gather(plain, grad=True)
        assert (found[row] - expected).norm() < 1e-5 * expected.norm()


def test_outputs_are_those_of_the_plain_model_and_its_parts_add_up() -> None:
    model, samples = MODELS["gpt2"]()
    problem = full_problem(model, samples, pass_bytes=1e5)
    x = problem.initial()
    outputs = problem.outputs(x, samples)
    assert outputs.shape == (10, 4)
    assert torch.equal(sum(problem.outputs(x, samples, part, 3) for part in range(3)), outputs)
    for sample in range(10):
        index = np.array([sample])
        with torch.no_grad():
            loss = plain_loss(model, samples, index)
        assert abs(outputs[sample, 0] / outputs[sample, 1] - loss) < 1e-5
    assert outputs[:, 1].tolist() == samples.sizes.tolist()
    assert ((outputs[:, 2] == outputs[:, 1]) == (outputs[:, 3] == 1)).all()


def test_exact_match_and_right_tokens_of_a_model_that_knows_its_sample() -> None:
    """All weights learn one sample by heart: every learned token is right."""
    model, samples = MODELS["gpt2"]()
    batches = ClientBatches([np.array([1])], batch_size=1, epochs=None, steps=60, seed=0)
    problem = FullProblem(model, samples, batches, lambda outputs, targets: outputs[:, 0])
    found = simulate(load_algorithm("localadamw", lr=0.02), problem, rounds=1, local_steps=60, progress=False)
    outputs = problem.outputs(found.x, samples)
    assert outputs[1, 2:].tolist() == [float(samples.sizes[1]), 1.0]
    assert outputs[0, 3] == 0


def test_nothing_of_the_model_changes() -> None:
    model = resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    problem = full_problem(model, Pixels.draw(12))
    simulate(load_algorithm("fedavg", lr=0.1), problem, rounds=2, local_steps=2, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize("name", [name for name in algorithm_names() if not load_algorithm(name, lr=0.01).contrastive])
def test_every_algorithm_trains_a_model_with_batch_norm(name: str) -> None:
    problem = full_problem(small_net(), Pixels.draw(12), clients=3)
    algorithm = load_algorithm(name, lr=0.01)
    found = simulate(algorithm, problem, rounds=2, local_steps=2, progress=False)
    assert found.buffers is not None
    assert torch.isfinite(found.x).all()
    assert not torch.equal(found.x, problem.initial())
    assert not torch.allclose(found.buffers, problem.model.first_buffers)


def test_a_contrast_of_a_model_with_batch_norm_is_refused() -> None:
    problem = full_problem(small_net(), Pixels.draw(12), clients=3)
    with pytest.raises(UserError, match=r"FullProblem: has running statistics \(batch norm\), .* set model.norm=group"):
        simulate(load_algorithm("moon", lr=0.01), problem, rounds=1, local_steps=1, progress=False)


def test_a_sample_that_the_model_cannot_compute_is_named() -> None:
    with pytest.raises(UserError, match=r"Linear cannot compute a sample of the data: .*pixel_values"):
        full_problem(nn.Linear(3, 3), Pixels.draw(4))


def test_a_batch_norm_that_counts_its_batches_is_refused() -> None:
    net = small_net()
    net.norm.momentum = None  # type: ignore[union-attr]
    with pytest.raises(UserError, match="norm: batch norm with momentum None counts the batches of all clients"):
        full_problem(net, Pixels.draw(4))


def test_a_batch_of_one_value_per_channel_names_its_client() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, pixel_values: Tensor) -> Any:
            from types import SimpleNamespace

            return SimpleNamespace(logits=self.norm(pixel_values.mean(dim=(2, 3), keepdim=True)).flatten(1))

    problem = full_problem(Pooled(), Pixels.draw(4), clients=1)
    with pytest.raises(UserError, match="client 0: batch norm needs more than its batch of 1; raise"):
        problem.gradient(problem.initial()[None], [0], 0, 1)


def test_settings_default_to_one_pass_per_client() -> None:
    assert FullSettings() == FullSettings(None, float("inf"), 0, False, False)
    assert callable(require_stackable)
