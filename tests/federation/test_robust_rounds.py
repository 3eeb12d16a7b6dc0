"""Robust rules in rounds: what liars reach with the mean and not with a rule, and what a left out client keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import MEAN, PLAIN, RobustSettings, UploadsSettings
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import Rows
from fedllm.common.errors import UserError
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, RoundReport, run_round, start
from fedllm.federation.sampling import chance_of_more, sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState

N, S, ROUNDS, DIM, BAD = 12, 9, 30, 40, (2, 7)
RULES = [
    RobustSettings("median", 2),
    RobustSettings("trimmed_mean", 2),
    RobustSettings("nnm_trimmed_mean", 2),
    RobustSettings("multi_krum", 2),
]


class Liars:
    """A step on uploads that replaces what BAD send, before the server reads it."""

    def __init__(self, attack: str) -> None:
        self.attack = attack

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        for row, client in enumerate(uploads.clients):
            if client in BAD:
                for value in uploads.sent.values():
                    value[row] = {"flip": -10 * value[row], "nan": value[row] * torch.nan}.get(
                        self.attack, 1000 * torch.randn(value.shape[1], generator=torch.Generator().manual_seed(row))
                    )

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """A lie is made where it is sent."""


def setup_of(name: str, robust: RobustSettings = MEAN, attack: str = "", uploads: UploadsSettings = PLAIN) -> Setup:
    algorithm = load_algorithm(name, lr=0.05, weights="uniform")
    base = QuadraticProblem.random(num_clients=N, dim=DIM, spread=0.1)
    problem = QuadraticProblem(base.H, base.a + 1, noise=0.05)
    info = round_info(algorithm, problem, rounds=ROUNDS, sampled=S, tracked=None, local_steps=4)
    pipeline = Pipeline.of(uploads, algorithm, 0, robust)
    steps = (*pipeline.steps, Liars(attack)) if attack else pipeline.steps
    return Setup(algorithm, problem, info, Pipeline(steps, pipeline.reduction, pipeline.settings))


def run(setup: Setup, rounds: int = ROUNDS, **plan: Any) -> tuple[FederationState, list[RoundReport]]:
    state, reports = start(setup), []
    for t in range(rounds):
        reports.append(run_round(setup, state, *sample(0, t, N, S, S), Plan(**plan)))
    return state, reports


def error(setup: Setup) -> float:
    state, problem = run(setup)[0], setup.problem
    assert isinstance(problem, QuadraticProblem)
    return float((state.x - problem.optimum()).norm() / problem.optimum().norm())


@pytest.mark.parametrize("attack", ["flip", "noise"])
@pytest.mark.slow
def test_the_mean_falls_and_the_rules_do_not(attack: str) -> None:
    clean = error(setup_of("fedavg"))
    assert clean < 0.3
    assert error(setup_of("fedavg", attack=attack)) > 1
    for robust in RULES:
        assert error(setup_of("fedavg", robust, attack)) < clean + 0.3, robust.rule


@pytest.mark.parametrize("robust", RULES, ids=lambda robust: robust.rule)
def test_nan_is_one_of_the_faulty(robust: RobustSettings) -> None:
    """With both bad clients rejected before, every rule is the mean of the others."""
    state, reports = run(setup_of("fedavg", robust, "nan"), 3)
    plain, others = run(setup_of("fedavg", MEAN, "nan"), 3)
    assert all("not finite" in other.rejected[client] for other in others for client in BAD)
    if robust.rule != "median":
        torch.testing.assert_close(state.x, plain.x, rtol=1e-9, atol=1e-9)
    for report, other in zip(reports, others, strict=True):
        left_out = 0 if robust.rule != "multi_krum" else robust.faulty
        assert len(report.rejected) == max(left_out or 0, len(other.rejected))


@pytest.mark.parametrize("robust", [RobustSettings("multi_krum", 2), RobustSettings(norm=3.0)], ids=["krum", "norm"])
@pytest.mark.parametrize("name", ["scaffold", "fadamgc"])
def test_a_client_that_is_left_out_keeps_its_state(name: str, robust: RobustSettings) -> None:
    setup = setup_of(name, robust, "flip")
    state, reports = run(setup, 6)
    named = [client for report in reports for client in report.rejected]
    assert set(BAD) <= set(named)
    assert all(why.startswith("robust.") for report in reports for why in report.rejected.values())
    kept = state.clients.get(list(range(N)))
    for tracked in setup.algorithm.tracked_uploads():
        assert all(float(kept[tracked][client].norm()) == 0 for client in BAD), "they were never accepted"
        mean = kept[tracked].double().mean(0)
        assert float((state.server[tracked] - mean).norm() / mean.norm()) <= 1e-6


@pytest.mark.parametrize("robust", [*RULES, RobustSettings(norm=3.0)], ids=lambda robust: robust.rule)
def test_stacking_and_parts_leave_no_trace(robust: RobustSettings) -> None:
    """Rows are sorted by client, so that even the bits of the reduction agree for the same uploads."""
    setup = setup_of("fedavg", robust, "flip", UploadsSettings(clip=1.0))
    one = run(setup, 3, stacked_clients=1)[0].x
    torch.testing.assert_close(run(setup, 3)[0].x, one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(run(setup, 3, parts=4)[0].x, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("robust", [*RULES, RobustSettings(norm=2.0)], ids=lambda robust: robust.rule)
def test_the_order_of_the_uploads_changes_no_bit(robust: RobustSettings) -> None:
    setup = setup_of("localadamw", robust)
    uploads, rng = {"d": torch.randn(S, DIM, generator=torch.Generator().manual_seed(0))}, torch.Generator()
    sent = {name: uploads.get(name, uploads["d"].square()) for name in setup.algorithm.uploads()}
    facts = Rows(torch.ones(S, 1), torch.arange(1.0, S + 1)[:, None], torch.ones(S, 1, dtype=torch.bool))

    def reduced(order: Sequence[int]) -> dict[str, Tensor]:
        declared = Declared.by(setup.algorithm, torch.zeros(DIM), setup.info)
        found = setup.pipeline.reduction(setup.algorithm, declared, setup.info, torch.device("cpu"))
        for row in order:
            found.add(Uploads(sent, {}, clients=range(S)), facts, [row], torch.ones(1))
        found.settle(0)
        result = found.result()
        return {**result.mean, "rate": torch.tensor(result.rate_sum)}

    first = reduced(range(S))
    for seed in range(5):
        again = reduced(torch.randperm(S, generator=rng.manual_seed(seed)).tolist())
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_norm_bound_spares_honest_clients() -> None:
    state, reports = run(setup_of("fedavg", RobustSettings(norm=20.0)), 5)
    assert not any(report.rejected for report in reports)
    plain, _ = run(setup_of("fedavg"), 5)
    torch.testing.assert_close(state.x, plain.x, rtol=1e-12, atol=1e-12)


def fit(name: str, rule: str, *given: Any, **keys: Any) -> str | None:
    algorithm: Algorithm = load_algorithm(name, **keys)
    return RobustSettings(rule, 2).misfit(algorithm, *given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (fit("scaffold", "median", 9), "robust.rule: found median, but Scaffold tracks c"),
        (fit("fedavg", "median", 9), "algorithm.weights: found size"),
        (fit("localadamw", "trimmed_mean", 4), "clients_per_round: found 4, .* needs 5 or more"),
        (fit("localadamw", "multi_krum", 6), "clients_per_round: found 6, .* needs 7 or more"),
        (fit("fadamgc", "multi_krum", 9, 4), "tracked_per_round: found 4, but robust.rule=multi_krum"),
        (fit("localadamw", "multi_krum", 9, 9, "poisson"), "federation.sampling: found poisson"),
    ],
)
def test_what_does_not_fit(found: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        raise UserError(str(found))


def test_what_fits() -> None:
    assert fit("fadamgc", "multi_krum", 9, 9) is None
    assert fit("localadamw", "nnm_trimmed_mean", 5) is None


def test_the_chance_of_more_bad_clients() -> None:
    """Of 20 clients 4 are bad; a round of 10 has all of them with C(16,6) / C(20,10)."""
    assert chance_of_more(3, 4, 20, 10) == pytest.approx(8008 / 184756)
    assert chance_of_more(4, 4, 20, 10) == 0
    assert chance_of_more(0, 1, 7, 7) == 1
