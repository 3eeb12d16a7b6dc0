"""Private gradients: Poisson batches, clipped sums and noise, against plain NumPy and by attack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from full_models import Pixels, full_problem, small_net
from private_clients import SIZES, Points, private
from scipy import stats

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.client import Client
from fedllm.common.errors import UserError
from fedllm.common.seeding import numpy_rng
from fedllm.data.poisson_batches import PoissonBatches
from fedllm.federation.info import round_info
from fedllm.problems.base import SampleGradients
from fedllm.problems.private import PrivateProblem, clipped_sums, seeded_noise

CLIENTS = range(len(SIZES))


def numpy_gradient(
    points: Points, x: np.ndarray, client: int, round: int, step: int, clip: float, noise: float, batch_size: int = 3
) -> np.ndarray:
    """DP-SGD's gradient as its paper has it, from the same draws."""
    part = points.parts[client]
    q = min(1.0, batch_size / len(part))
    taken = part[numpy_rng(0, "poisson batches", round, client, step).random(len(part)) < q]
    total = np.zeros(points.dim)
    for sample in taken:
        g = points.curvature[client].numpy() * (x - points.points[sample].numpy())
        total += g / max(1.0, np.linalg.norm(g) / clip)
    total += noise * clip * numpy_rng(0, "noise", round, client, step).standard_normal(points.dim)
    return total / (q * len(part))


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_a_gradient_is_that_of_dp_sgd(noise: float) -> None:
    points = Points()
    problem = private(points, points.parts, noise=noise)
    X = torch.randn(len(SIZES), points.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for step in range(6):
        found = problem.gradient(X, CLIENTS, 2, step)
        for client in CLIENTS:
            expected = numpy_gradient(points, X[client].numpy(), client, 2, step, 0.5, noise)
            assert np.allclose(found[client], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fedadamw"])
def test_a_run_is_dp_sgd_or_dp_adamw_in_numpy(name: str) -> None:
    """FedAdamW of one client that sends everything: AdamW whose moments see private gradients alone."""
    lr, K, rounds = 0.1, 4, 3
    settings: dict[str, Any] = {"lr": lr}
    if name == "fedadamw":
        settings |= {"alpha": 0.0, "weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "blocks": "elementwise"}
    points = Points(sizes=(9,))
    problem = private(points, points.parts, noise=0.7)
    found = simulate(load_algorithm(name, **settings), problem, rounds=rounds, local_steps=K, progress=False)
    x, v, t = np.zeros(points.dim), np.zeros(points.dim), 0
    for round in range(rounds):
        m = np.zeros(points.dim)
        for k in range(K):
            g = numpy_gradient(points, x, 0, round, k, 0.5, 0.7)
            t += 1
            if name == "fedavg":
                x = x - lr * g
                continue
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            hat_m, hat_v = m / (1 - 0.9 ** (k + 1)), v / (1 - 0.99**t)
            x = x - lr * (hat_m / (np.sqrt(hat_v) + 1e-3) + 0.01 * x)
    assert np.allclose(found.x, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fadamgc", "scaffold", "localadamw"])
def test_grouping_changes_no_bit(name: str) -> None:
    def run(stacked: int | None, cut: int) -> torch.Tensor:
        points = Points(cut=cut)
        problem = private(points, points.parts, noise=0.7)
        algorithm = load_algorithm(name, lr=0.05)
        return simulate(
            algorithm, problem, rounds=4, local_steps=3, clients_per_round=3, stacked_clients=stacked, progress=False
        ).x

    assert torch.equal(run(None, 3), run(1, 3))
    assert torch.equal(run(None, 3), run(2, 1))


def test_noise_has_its_variance_and_is_independent() -> None:
    dim, clip, noise, K = 50_000, 0.3, 1.5, 2
    points = Points(dim=dim)
    zero = PoissonBatches(points.parts, 3, 0)
    problem = PrivateProblem(_Nothing(points), zero, clip=clip, noise=noise, draws=seeded_noise(0))
    X = torch.zeros(len(SIZES), dim, dtype=torch.float64)
    drawn = [problem.gradient(X, CLIENTS, round, step) for round in range(2) for step in range(K)]
    rows = torch.cat(drawn) * 3 / (clip * noise)
    low, high = stats.chi2.ppf([1e-5, 1 - 1e-5], dim)
    for row in rows:
        assert low < float((row**2).sum()) < high
        assert abs(float(row.mean())) < 4.5 / dim**0.5
    correlations = rows @ rows.T / dim - torch.diag((rows**2).mean(1))
    assert float(correlations.abs().max()) < 5 / dim**0.5
    assert torch.equal(drawn[0], problem.gradient(X, CLIENTS, 0, 0))
    other = PrivateProblem(_Nothing(points), zero, clip=clip, noise=noise, draws=seeded_noise(1))
    assert not torch.equal(drawn[0], other.gradient(X, CLIENTS, 0, 0))


class _Nothing(Points):
    """No sample has a gradient."""

    def __init__(self, points: Points) -> None:
        self.__dict__.update(vars(points))

    def sample_gradients(self, X: Any, samples: Any, clients: Any, round: int, step: int) -> Any:
        return iter(())


def test_an_empty_batch_gives_noise_alone() -> None:
    points = Points(sizes=(2000,))
    problem = private(points, points.parts, batch_size=1, noise=1.0)
    batches = PoissonBatches(points.parts, 1, 0)
    empty = next(step for step in range(100) if len(batches.indices(0, 0, step)) == 0)
    loss, gradient = problem.loss_and_gradient(torch.zeros(1, points.dim, dtype=torch.float64), [0], 0, empty)
    expected = 0.5 * numpy_rng(0, "noise", 0, 0, empty).standard_normal(points.dim)
    assert loss.tolist() == [0.0]
    assert np.allclose(gradient[0], expected, rtol=0, atol=1e-15)


def test_any_sample_changes_a_sum_by_at_most_the_clip() -> None:
    """The sum with the sample against that without it; huge values and NaN included."""
    clip, draw = 0.5, np.random.default_rng(3)
    for attempt in range(200):
        row = torch.from_numpy(draw.standard_normal(40) * 10.0 ** draw.uniform(-12, 30)).float()
        if attempt % 10 == 0:
            row[draw.integers(40)] = [torch.nan, torch.inf, -torch.inf][attempt // 10 % 3]
        others = torch.from_numpy(draw.standard_normal((5, 40))).float()
        zeros = torch.zeros(6)

        def total(gradients: torch.Tensor, zeros: torch.Tensor = zeros) -> torch.Tensor:
            part = SampleGradients([0] * len(gradients), zeros, gradients)
            return clipped_sums(torch.zeros(1, 40), iter([part]), clip)[1][0]

        with_it, without = total(torch.cat([others, row[None]])), total(others)
        assert float((with_it - without).double().norm()) <= clip * (1 + 1e-6) + 1e-6


def test_a_norm_of_ten_million_values_is_exact() -> None:
    """In float32 it would be too small by some 1e-4, and the clip too weak."""
    gradients = torch.randn(1, 10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-3
    part = SampleGradients([0], torch.zeros(1), gradients)
    _, (total,) = clipped_sums(torch.zeros(1, 10_000_000), iter([part]), 0.1)
    assert float(total.double().norm()) == pytest.approx(0.1, rel=1e-7)


def test_batches_are_binomial_and_each_sample_comes_by_itself() -> None:
    part, steps, q = np.arange(100, 140), 4000, 8 / 40
    batches = PoissonBatches([part, part[:5]], 8, 0)
    taken = np.zeros((steps, 40))
    for step in range(steps):
        taken[step, batches.indices(0, step // 50, step % 50) - 100] = 1
    counts = np.bincount(taken.sum(1).astype(int), minlength=41)
    expected = steps * stats.binom.pmf(np.arange(41), 40, q)
    low, high = 3, 15
    observed = [counts[:low].sum(), *counts[low:high], counts[high:].sum()]
    wanted = [expected[:low].sum(), *expected[low:high], expected[high:].sum()]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3
    assert np.abs(taken.mean(0) - q).max() < 5 * (q * (1 - q) / steps) ** 0.5
    joint = (taken[:, :-1] * taken[:, 1:]).mean(0)
    assert np.abs(joint - q * q).max() < 5 * (q * q / steps) ** 0.5
    assert batches.rate(0) == q
    assert (batches.rate(1), batches.expected(1)) == (1.0, 5)
    assert len(batches.indices(1, 0, 0)) == 5  # fewer samples than batch_size: all of them


def test_draws_of_the_system_are_binomial_too_and_never_the_same() -> None:
    batches = PoissonBatches([np.arange(1000)], 100)
    first, second = batches.indices(0, 0, 0), batches.indices(0, 0, 0)
    assert not np.array_equal(first, second)
    sizes = [len(batches.indices(0, 0, 0)) for _ in range(200)]
    assert abs(np.mean(sizes) - 100) < 5 * (90 / 200) ** 0.5


def test_settings_of_samples_are_refused_where_nothing_would_follow_them() -> None:
    settings, points = PrivacySettings(level="sample", noise=1.0, clip=0.5), Points()
    with pytest.raises(UserError, match=r"privacy.level: found sample, .*give as problem a .*PrivateProblem"):
        simulate(load_algorithm("fedavg"), points, rounds=1, local_steps=1, privacy=settings)
    info = round_info(load_algorithm("fedavg"), points, rounds=1, sampled=4, tracked=None, local_steps=1)
    with pytest.raises(UserError, match=r"privacy.level: found sample, expected client: a loop of your own"):
        Client(torch.nn.Linear(4, 1), load_algorithm("fedavg"), info, privacy=settings)


def test_losses_are_by_the_expected_batch() -> None:
    points = Points()
    problem, batches = private(points, points.parts), PoissonBatches(points.parts, 3, 0)
    X = torch.zeros(4, points.dim, dtype=torch.float64)
    losses, _ = problem.loss_and_gradient(X, CLIENTS, 0, 0)
    for client in CLIENTS:
        taken = torch.from_numpy(batches.indices(client, 0, 0))
        each = 0.5 * (points.curvature[client] * points.points[taken] ** 2).sum(1)
        assert float(losses[client]) == pytest.approx(float(each.sum()) / 3)


def test_problems_that_cannot_be_private_say_so() -> None:
    plain = QuadraticProblem.random(2, 3)
    problem = private(plain, [np.arange(3)] * 2)
    with pytest.raises(UserError, match=r"QuadraticProblem.sample_gradients: missing, .*privacy.level=sample needs it"):
        problem.gradient(torch.zeros(2, 3, dtype=torch.float64), [0, 1], 0, 0)
    points = Points()
    with pytest.raises(UserError, match=r"tracking_init=gradient: full gradients get no noise; set .*zero"):
        simulate(
            load_algorithm("fadamgc", tracking_init="gradient"), private(points, points.parts), rounds=1, local_steps=1
        )
    normed = full_problem(small_net(), Pixels.draw(8))
    with pytest.raises(UserError, match=r"FullProblem: has running statistics .*set model.norm=group"):
        private(normed, normed.batches.parts)
