"""Rounds that train sets of coordinates in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import Problem, load_algorithm, simulate
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import DownloadsSettings, RobustSettings, UploadsSettings
from fedllm.algorithms import algorithm_names
from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import whole
from fedllm.common.errors import UserError
from fedllm.federation.costs import round_bytes, vectors_per_round
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState
from fedllm.federation.turns import make_turns

N, K, ROUNDS = 5, 3, 8
SIZES = (1, 3, 2)
SETS = [torch.tensor([4, 5, 0]), torch.tensor([1, 2, 3])]  # blocks c and a, and block b
VARIANTS = [
    ("fadamgc", {"tracking_init": "gradient"}),
    ("localadamw", {"aggregate": "vm"}),
    ("localadamw", {"aggregate": "mean_v"}),
    ("fa_nt", {"form": "one_vector"}),
    ("fedadamw", {"blocks": "elementwise"}),
]


class Separable(Problem):
    """f_i(x) = sum_j h_ij (x_j - a_ij)^2 / 2 over some of six coordinates: none of them knows of the others."""

    num_clients = N

    def __init__(self, chosen: Tensor | None = None) -> None:
        chosen = torch.arange(6) if chosen is None else chosen.sort().values
        make = torch.Generator().manual_seed(3)
        h, a = (torch.rand(N, 6, generator=make, dtype=torch.float64) + 0.5 for _ in range(2))
        self.dim, self._h, self._a = len(chosen), h[:, chosen], a[:, chosen]
        names = zip("abc", SIZES, range(3), strict=True)
        starts = torch.tensor([0, *SIZES]).cumsum(0).tolist()
        tiles = [whole(name, "tensor", size) for name, size, n in names if starts[n] in chosen]
        self.blocks = BlockPartition(tuple(tiles))

    def initial(self) -> Tensor:
        return torch.zeros(self.dim, dtype=torch.float64)

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self._h[list(clients)] * (X - self._a[list(clients)])

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        return self.gradient(x.expand(len(clients), -1), clients, 0, 0)


def pairs(everyone: bool) -> list[tuple[list[int], list[int]]]:
    return [sample(0, t, N, N if everyone else 3, N if everyone else 2) for t in range(ROUNDS)]


# Left out: in q-FedAvg a client's loss and the length of its update, in MOON the cosines, are those of all coordinates.
APART = [(name, {}) for name in algorithm_names() if name not in ("qfedavg", "moon")]


@pytest.mark.parametrize(("name", "options"), [*APART, *VARIANTS])
def test_each_set_is_trained_as_by_a_run_of_its_own(name: str, options: dict[str, Any]) -> None:
    """Oracle: where the objective is a sum over the sets, T rounds in turn are T/2 rounds of each set by itself."""
    alg = load_algorithm(name, lr=0.05, **options)
    order = pairs(everyone=options.get("form") == "one_vector")
    both = simulate(alg, Separable(), rounds=ROUNDS, local_steps=K, schedule=order, turns=SETS)
    for turn, chosen in enumerate(SETS):
        rising = chosen.sort().values
        own = Separable(chosen)
        alone = simulate(alg, own, rounds=ROUNDS // 2, local_steps=K, schedule=order[turn::2])
        assert not torch.equal(alone.x, own.initial()), "it has learned something"
        assert torch.equal(both.x[rising], alone.x)
        numbers = torch.tensor([0, 2] if turn == 0 else [1])
        for ours, theirs in ((both.server, alone.server), (both.clients, alone.clients)):
            for key, value in ours.items():
                places = numbers if value.shape[-1] == 3 else rising
                assert torch.equal(value[..., places], theirs[key]), key


def test_a_round_leaves_the_other_coordinates_as_they_are() -> None:
    """Weight decay, moments and what clients keep included."""
    alg = load_algorithm("fadamgc", lr=0.05, weight_decay=0.1)
    setup, state = federation(alg)
    for t in range(4):
        before, clients = (state.x.clone(), dict(state.server)), state.clients.get(range(N))
        run_round(setup, state, *sample(0, t, N, 3, 3))
        idle = SETS[(t + 1) % 2]
        assert torch.equal(state.x[idle], before[0][idle])
        assert not torch.equal(state.x, before[0])
        assert all(torch.equal(state.server[name][idle], value[idle]) for name, value in before[1].items())
        after = state.clients.get(range(N))
        assert all(torch.equal(after[name][:, idle], value[:, idle]) for name, value in clients.items())
        assert any(not torch.equal(after[name], value) for name, value in clients.items())


def federation(alg: Any, folder: Path | None = None, **parts: Any) -> tuple[Setup, FederationState]:
    problem = Separable()
    info = round_info(alg, problem, rounds=ROUNDS, sampled=3, tracked=3, local_steps=K, turns=2)
    setup = Setup(alg, problem, info, turns=make_turns(SETS, info.blocks), **parts)
    return setup, start(setup, folder=folder)


def test_bytes_are_those_of_the_turn_with_all_of_x_down() -> None:
    alg = load_algorithm("fadamgc", lr=0.05)
    setup, state = federation(alg)
    reports = [run_round(setup, state, *sample(0, t, N, 3, 3)) for t in range(2)]
    for report in reports:  # three clients; d and y up, x and y down, of three of six coordinates but for x; float64
        assert report.bytes_up == 3 * 2 * 3 * 8
        assert report.bytes_down == 3 * (6 + 3) * 8
        assert report.client_bytes == (2 * 3 + 6 + 3) * 8
    assert round_bytes(setup, state.x) == (reports[0].bytes_up, reports[0].bytes_down)
    assert vectors_per_round(alg, setup.info, 6) == 1 + 3 / 2


@pytest.mark.parametrize("uploads", [UploadsSettings(bits="int8"), UploadsSettings(clip=0.05)])
def test_the_servers_y_stays_the_mean_of_the_clients(uploads: UploadsSettings) -> None:
    alg = load_algorithm("scaffold", lr=0.05)
    found = simulate(alg, Separable(), rounds=ROUNDS, local_steps=K, clients_per_round=3, uploads=uploads, turns=SETS)
    torch.testing.assert_close(found.server["c"], found.clients["c"].mean(0), rtol=1e-9, atol=1e-12)
    assert found.server["c"].abs().min() > 0


def test_files_groups_and_parts_change_nothing(tmp_path: Path) -> None:
    alg = load_algorithm("fedadamw", lr=0.05)
    states = []
    for plan, folder in ((Plan(), None), (Plan(stacked_clients=1), tmp_path), (Plan(parts=3), None)):
        setup, state = federation(alg, folder)
        for t in range(4):
            run_round(setup, state, *sample(0, t, N, 3, 3), plan)
        states.append(state)
    assert torch.equal(states[0].x, states[1].x)
    torch.testing.assert_close(states[0].x, states[2].x, rtol=1e-12, atol=1e-14)


def test_clients_read_the_rounded_x_of_the_others_too() -> None:
    alg = load_algorithm("fedavg", lr=0.05)
    setup, state = federation(alg, downloads=DownloadsSettings(bits="bfloat16"))
    state.x += torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=torch.float64)
    seen: list[Tensor] = []
    inner = setup.problem.gradient
    setup.problem.gradient = lambda X, *others: (seen.append(X.clone()), inner(X, *others))[1]  # type: ignore[method-assign]
    report = run_round(setup, state, [0, 1, 2], [0, 1, 2])
    assert torch.equal(seen[0], state.x.new_tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).bfloat16().double().expand(3, -1))
    assert torch.equal(state.x[SETS[1]], torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64)), "never the server's own"
    assert report.bytes_down == 3 * 2 * 6


def test_an_empty_round_adds_noise_to_its_turn_alone() -> None:
    alg = load_algorithm("fedavg", lr=0.05, weights="uniform")
    privacy = PrivacySettings(noise=1.0, delta=1e-3)
    pipeline = Pipeline.of(UploadsSettings(clip=1.0), alg, 0, privacy=privacy)
    setup, state = federation(alg, pipeline=pipeline)
    run_round(setup, state, [], [])
    assert state.round == 1
    assert bool((state.x[SETS[0]] != 0).all())
    assert not state.x[SETS[1]].any()


def test_a_rejected_client_keeps_its_vectors() -> None:
    alg = load_algorithm("scaffold", lr=0.05)
    pipeline = Pipeline.of(UploadsSettings(), alg, 0, RobustSettings(norm=3))
    setup, state = federation(alg, pipeline=pipeline)
    setup.problem._a[1] *= 100  # type: ignore[attr-defined]
    report = run_round(setup, state, [0, 1, 2], [0, 1, 2])
    assert [*report.rejected] == [1]
    kept = state.clients.get([0, 1])["c"]
    assert not kept[1].any()
    assert kept[0].any()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([SETS[0]], "found 1 sets with 3 coordinates in all, expected two sets or more with each of the 6"),
        ([SETS[0], torch.tensor([1, 2])], "found 2 sets with 5 coordinates"),
        ([SETS[0], torch.tensor([1, 2, 0])], "found 2 sets with 6 coordinates"),
        ([torch.arange(6), torch.arange(0)], "set 2 is empty"),
        ([torch.tensor([0, 1]), torch.arange(2, 6)], "set 1 divides a tensor with blocks: b: found 1 of 3 coord"),
    ],
)
def test_sets_that_do_not_fit(sets: list[Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(load_algorithm("fedadamw"), Separable(), rounds=2, local_steps=1, turns=sets)


def test_the_info_of_a_turn_counts_its_own_rounds() -> None:
    info = round_info(load_algorithm("fedavg"), Separable(), rounds=9, sampled=2, tracked=2, local_steps=1, turns=2)
    assert [replace(info, index=t).earlier for t in range(5)] == [0, 0, 1, 1, 2]
