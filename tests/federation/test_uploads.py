"""Clipped and rounded uploads in a run of rounds: the clients keep what they sent, for every algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import DownloadsSettings, UploadsSettings
from fedllm.algorithms import algorithm_names
from fedllm.common.errors import UserError
from fedllm.federation.costs import round_bytes
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState

N, S, T, ROUNDS, DIM = 12, 5, 3, 8, 300
SETTINGS = [
    UploadsSettings(clip=0.05),
    UploadsSettings(bits="bfloat16"),
    UploadsSettings(bits="int8"),
    UploadsSettings(bits="int4"),
    UploadsSettings(clip=0.05, bits="int4"),
]


def named(settings: UploadsSettings) -> str:
    return f"{settings.bits}{'' if settings.clip is None else '-clipped'}"


def setup_of(name: str, settings: UploadsSettings, **keys: Any) -> Setup:
    algorithm = load_algorithm(name, **keys)
    problem = QuadraticProblem.random(num_clients=N, dim=DIM, spread=2.0, noise=0.1)
    info = round_info(algorithm, problem, rounds=ROUNDS, sampled=S, tracked=T, local_steps=4)
    return Setup(algorithm, problem, info, Pipeline.of(settings, algorithm, seed=0))


def run(setup: Setup, rounds: int = ROUNDS, stacked: int | None = None) -> FederationState:
    state = start(setup)
    for t in range(rounds):
        run_round(setup, state, *sample(0, t, N, S, T), Plan(stacked_clients=stacked))
    return state


def mean_of(state: FederationState, name: str) -> Tensor:
    return state.clients.get(list(range(N)), state.x.device)[name].double().mean(0)


TRACKING = [name for name in algorithm_names() if load_algorithm(name).tracked_uploads()]


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
@pytest.mark.parametrize("name", TRACKING)
def test_the_servers_vector_is_the_mean_of_the_clients(name: str, settings: UploadsSettings) -> None:
    setup = setup_of(name, settings)
    state = run(setup)
    for tracked in setup.algorithm.tracked_uploads():
        found = state.server[tracked].double()
        assert float(found.norm()) > 0
        assert float((found - mean_of(state, tracked)).norm() / found.norm()) <= 1e-5


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_feddyns_h_is_the_mean_of_the_clients(settings: UploadsSettings) -> None:
    state = run(setup_of("feddyn", settings))
    assert float((state.server["h"].double() - mean_of(state, "h")).norm() / state.server["h"].norm()) <= 1e-5


def test_without_the_keys_nothing_changes() -> None:
    plain = Pipeline.of(UploadsSettings(), load_algorithm("fadamgc"), 0)
    assert plain == Pipeline()


@pytest.mark.parametrize("name", ["fadamgc", "fedadamw", "localadamw"])
@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_stacked_clients_change_rounding_at_most(name: str, settings: UploadsSettings) -> None:
    """In float64, where a difference in the last digit moves no integer: it would show in x at 1e-3."""
    setup = setup_of(name, settings)
    one, all_ = (run(setup, 3, stacked).x for stacked in (1, None))
    torch.testing.assert_close(one, all_, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("bits", "most"), [("bfloat16", 0.51), ("int8", 0.27), ("int4", 0.15)])
def test_bytes_of_a_round(bits: Any, most: float) -> None:
    plain, small = (
        run_round(setup, start(setup), *sample(0, 0, N, S, T))
        for setup in (setup_of("fadamgc", UploadsSettings()), setup_of("fadamgc", UploadsSettings(bits=bits)))
    )
    assert small.bytes_up <= most * plain.bytes_up
    assert small.bytes_down == plain.bytes_down


@pytest.mark.parametrize("downloads", [DownloadsSettings(), DownloadsSettings("bfloat16")], ids=str)
@pytest.mark.parametrize("bits", ["float32", "int8"])
@pytest.mark.parametrize("name", ["fadamgc", "fedadamw"])
def test_the_plan_counts_the_bytes_of_a_round(name: str, bits: Any, downloads: DownloadsSettings) -> None:
    setup = replace(setup_of(name, UploadsSettings(bits=bits)), downloads=downloads)
    state = start(setup)
    report = run_round(setup, state, *sample(0, 0, N, S, T))
    assert round_bytes(setup, state.x) == (report.bytes_up, report.bytes_down)


def test_no_client_moves_the_mean_by_more_than_its_norm() -> None:
    setup = setup_of("fedavg", UploadsSettings(clip=0.1), weights="uniform", lr=0.5)
    state = start(setup)
    before = state.x.clone()
    run_round(setup, state, *sample(0, 0, N, S, T))
    assert 0 < float((state.x - before).norm()) <= 0.1 * (1 + 1e-6)
    free = start(without := replace(setup, pipeline=Pipeline()))
    run_round(without, free, *sample(0, 0, N, S, T))
    assert float((free.x - before).norm()) > 0.2


def test_rounding_costs_no_accuracy_on_a_quadratic() -> None:
    problem = setup_of("fadamgc", UploadsSettings()).problem
    optimum = problem.optimum()  # type: ignore[attr-defined]

    def error(bits: Any) -> float:
        return float((run(setup_of("fadamgc", UploadsSettings(bits=bits), lr=0.02)).x - optimum).norm())

    plain = error("float32")
    assert error("int8") < 1.02 * plain
    assert error("int8") != plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": -1.0}, "clip: found -1.0, expected a number above 0"),
        ({"clip": {"d": 0.0}}, "clip: found 0.0 for d, expected a number above 0"),
        ({"clip": {}}, "clip: found no norm"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        UploadsSettings(**settings)


def test_a_norm_for_a_vector_that_is_not_sent() -> None:
    with pytest.raises(UserError, match="found a norm for 'y', expected one for d and vbar, which FedAdamW sends"):
        UploadsSettings(clip={"y": 1.0}).norms(load_algorithm("fedadamw"))
