"""Coordinates that clients keep to themselves: each algorithm trains them as if the other clients were not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import UploadsSettings
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.run_facts import RunFacts
from fedllm.federation.info import round_info
from fedllm.federation.personal import require_personal
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.setup import PERSONAL, Setup

CLIENTS, DIM, PLACES = 3, 6, [1, 4, 5]
SHARED = [place for place in range(DIM) if place not in PLACES]
INDEPENDENT: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}), ("fedavg", {"server_lr": 0.5}), ("fedprox", {}), ("fedadam", {}), ("fedyogi", {}),
    ("fedadagrad", {}), ("fedams", {}), ("localadam", {}), ("localadam", {"second_moment": "persist"}),
    ("localadamw", {}), ("scaffold", {}), ("feddyn", {}), ("fadamgc", {}), ("fa_nt", {}),
]  # fmt: skip


def problem(personal: bool = True) -> QuadraticProblem:
    """Diagonal quadratics: no coordinate's gradient depends on another."""
    rng = torch.Generator().manual_seed(3)
    curves = 0.5 + torch.rand(CLIENTS, DIM, generator=rng, dtype=torch.float64)
    targets = torch.randn(CLIENTS, DIM, generator=rng, dtype=torch.float64)
    x0 = torch.randn(DIM, generator=rng, dtype=torch.float64)
    blocks = BlockPartition.elementwise(DIM)
    found = QuadraticProblem(torch.diag_embed(curves), targets, x0=x0, blocks=blocks)
    found.personal = torch.tensor(PLACES) if personal else None
    return found


def setup_of(of: QuadraticProblem, name: str, pipeline: Pipeline | None = None, **settings: Any) -> Setup:
    algorithm = load_algorithm(name, lr=0.05, **settings)
    info = round_info(algorithm, of, rounds=4, sampled=CLIENTS, tracked=None, local_steps=3)
    return Setup(algorithm, of, info, pipeline or Pipeline())


@pytest.mark.parametrize(("name", "settings"), INDEPENDENT, ids=str)
def test_personal_coordinates_train_as_without_the_other_clients(name: str, settings: dict[str, Any]) -> None:
    """And the shared ones as if nothing were personal, since no gradient mixes the two."""
    algorithm = load_algorithm(name, lr=0.05, **settings)
    everyone = [([0, 1, 2], [0, 1, 2])] * 4
    given: dict[str, Any] = {"rounds": 4, "local_steps": 3, "progress": False}
    found = simulate(algorithm, problem(), schedule=everyone, **given)
    alone = simulate(algorithm, problem(), schedule=[([1], [1])] * 4, **given)
    plain = simulate(algorithm, problem(personal=False), schedule=everyone, **given)
    own = found.clients[PERSONAL]
    torch.testing.assert_close(own[1], alone.clients[PERSONAL][1], rtol=0, atol=0)
    torch.testing.assert_close(found.x[SHARED], plain.x[SHARED], rtol=1e-12, atol=1e-12)
    x0, a = problem().initial()[PLACES], problem().a[:, PLACES]
    assert torch.equal(found.x[PLACES], x0)
    assert bool(((own - a).abs() < (x0 - a).abs()).all())  # each went towards its own minimum


def test_moon_contrasts_whole_models() -> None:
    """One client by itself trains as if no coordinate were personal, although MOON's cosines mix them."""
    given: dict[str, Any] = {"rounds": 4, "local_steps": 3, "progress": False, "schedule": [([1], [1])] * 4}
    found, plain = (simulate(load_algorithm("moon", lr=0.05), problem(personal), **given) for personal in (True, False))
    torch.testing.assert_close(found.x[SHARED], plain.x[SHARED], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.clients[PERSONAL][1], plain.x[PLACES], rtol=1e-12, atol=1e-12)


def test_scaffold_takes_plain_steps_on_personal_coordinates() -> None:
    """x -= eta h (x - a), 4 rounds of 3 steps, in closed form; and c and c_i stay 0 there."""
    of = problem()
    found = simulate(load_algorithm("scaffold", lr=0.05), of, rounds=4, local_steps=3, progress=False)
    h, a, x0 = of.H.diagonal(dim1=1, dim2=2)[:, PLACES], of.a[:, PLACES], of.initial()[PLACES]
    torch.testing.assert_close(found.clients[PERSONAL], a + (x0 - a) * (1 - 0.05 * h) ** 12, rtol=1e-12, atol=1e-12)
    assert not found.server["c"][PLACES].any()
    assert not found.clients["c"][:, PLACES].any()
    assert found.clients["c"][:, SHARED].all()


@pytest.mark.parametrize("uploads", [{"clip": 0.05}, {"bits": "int8"}], ids=["clipped", "int8"])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fadamgc"])
def test_steps_on_uploads_leave_personal_coordinates_alone(name: str, uploads: dict[str, Any]) -> None:
    of = problem()
    of.H, of.a, of._x0 = of.H.float(), of.a.float(), of._x0.float()
    algorithm = load_algorithm(name, lr=0.05)
    setup = setup_of(of, name, Pipeline.of(UploadsSettings(**uploads), algorithm, seed=0))
    state, plain = start(setup), start(setup_of(of, name))
    for _ in range(3):
        run_round(setup, state, range(CLIENTS), range(CLIENTS))
        run_round(setup_of(of, name), plain, range(CLIENTS), range(CLIENTS))
    own, expected = (each.clients.get(range(CLIENTS))[PERSONAL] for each in (state, plain))
    assert torch.equal(own, expected)
    assert not torch.equal(state.x, plain.x)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("fedcm", {}, "mix the gradient with Delta"),
        ("fedavgm", {}, "mix the gradient with G"),
        ("scaffoldm", {}, "mix the gradient with G"),
        ("padamfed", {}, "mix the gradient with G"),
        ("fedlada", {}, "averages vhat"),
        ("qfedavg", {}, "counts the change of all coordinates"),
        ("localadamw", {"aggregate": "v"}, "averages v of each"),
        ("fedadamw", {"form": "alg3"}, "mix the gradient with Delta"),
        ("fa_nt", {"form": "one_vector"}, "form=tracked"),
        ("fadamgc", {"tracking_init": "gradient"}, "tracking_init=zero"),
    ],
)
def test_an_algorithm_whose_steps_need_all_coordinates_is_refused(
    name: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=f"deployment.keep_local: found head, but {name}.*{why}"):
        require_personal(load_algorithm(name, **settings), name)


def test_the_four_of_the_issue_are_not_refused() -> None:
    for name in ("fadamgc", "fedadamw", "scaffold", "localadamw", "fadamgc_b"):
        require_personal(load_algorithm(name), name)


def test_how_clients_are_grouped_changes_no_bit() -> None:
    found = []
    for stacked, parts in ((None, 1), (1, 1), (1, 2)):
        setup = setup_of(problem(), "fedadamw")
        state = start(setup)
        for clients in ([0, 1], [1, 2], [0, 2]):
            run_round(setup, state, clients, clients, Plan(stacked, parts=parts))
        found.append((state.x, state.clients.get(range(CLIENTS))[PERSONAL]))
    assert all(torch.equal(x, found[0][0]) and torch.equal(own, found[0][1]) for x, own in found)


def test_a_checkpoint_holds_the_personal_coordinates(tmp_path: Path) -> None:
    setup = setup_of(problem(), "fadamgc")
    (tmp_path / "files").mkdir()
    state = start(setup, folder=tmp_path / "files")
    run_round(setup, state, [0, 2], [0, 2])
    checkpoints = Checkpoints(tmp_path / "checkpoints", print)
    checkpoints.save(state, [], RunFacts(1, "auto", 1, "float32"))
    again = start(setup)
    snapshot = checkpoints.latest()
    assert snapshot is not None
    snapshot.restore(again)
    ours, theirs = (each.clients.get(range(CLIENTS))[PERSONAL] for each in (again, state))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[1], problem().initial()[PLACES])
    assert not torch.equal(ours[0], ours[2])
