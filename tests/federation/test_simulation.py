"""simulate(), the round loop beneath it, and the problems it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedllm import Algorithm, Problem, QuadraticProblem, load_algorithm, simulate
from fedllm.algorithms.base import RoundInfo
from fedllm.blocks import BlockPartition
from fedllm.common.errors import RunError, UserError
from fedllm.common.tensors import State
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup

FEDAVG = load_algorithm("fedavg", lr=0.1)


def quadratic(**options: object) -> QuadraticProblem:
    base = QuadraticProblem.random(5, 3, seed=2)
    return QuadraticProblem(base.H, base.a, **options)  # type: ignore[arg-type]


class Lines(Problem):
    """f_i(x) = (i + 1) x on one coordinate: client i's gradient is i + 1 wherever it is."""

    dim, num_clients = 1, 4

    def __init__(self, steps: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> None:
        self.calls: list[tuple[list[int], int, int]] = []
        self._steps, self._sizes = steps, sizes

    def initial(self) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        self.calls.append((list(clients), round, step))
        return torch.tensor([[client + 1.0] for client in clients], dtype=X.dtype)

    def loss_and_gradient(
        self, X: Tensor, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        return torch.tensor([10.0 * client + step for client in clients]), self.gradient(X, clients, round, step)

    def steps(self, clients: Sequence[int], round: int) -> Tensor | None:
        return None if self._steps is None else torch.tensor([self._steps[client] for client in clients])

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return super().sizes(clients) if self._sizes is None else torch.tensor([self._sizes[c] for c in clients])


# What comes back.


def test_result_has_the_promised_shapes() -> None:
    alg = load_algorithm("fadamgc")
    result = simulate(alg, quadratic(), rounds=4, local_steps=2, clients_per_round=3)
    assert result.history.shape == (5, 3)
    assert torch.equal(result.history[0], quadratic().initial())
    assert torch.equal(result.history[-1], result.x)
    assert {name: tuple(value.shape) for name, value in result.server.items()} == {"y": (3,)}
    assert {name: tuple(value.shape) for name, value in result.clients.items()} == dict.fromkeys(
        ("y", "v", "vhat"), (5, 3)
    )
    assert len(result.loss) == 4
    assert {value.dtype for value in (result.x, *result.server.values(), *result.clients.values())} == {torch.float64}


def test_no_rounds_return_the_start() -> None:
    x0 = torch.arange(3, dtype=torch.float64)
    result = simulate(FEDAVG, quadratic(), rounds=0, local_steps=2, x0=x0)
    assert torch.equal(result.history, x0[None])


def test_the_start_is_not_changed() -> None:
    x0 = torch.ones(3, dtype=torch.float64)
    result = simulate(FEDAVG, quadratic(), rounds=1, local_steps=2, x0=x0)
    assert torch.equal(x0, torch.ones(3, dtype=torch.float64))
    assert not torch.equal(result.x, x0)


def test_inference_mode_changes_nothing() -> None:
    expected = simulate(FEDAVG, quadratic(), rounds=2, local_steps=2).x
    with torch.inference_mode():
        assert torch.equal(simulate(FEDAVG, quadratic(), rounds=2, local_steps=2).x, expected)


def test_seed_decides_and_nothing_else() -> None:
    def run(seed: int, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        problem = quadratic(noise=0.1)
        return simulate(FEDAVG, problem, rounds=6, local_steps=2, clients_per_round=2, seed=seed).x

    assert torch.equal(run(0, global_seed=1), run(0, global_seed=2))
    assert not torch.equal(run(0, global_seed=1), run(1, global_seed=1))


# Who trains, how much, with what weight.


@given(seed=st.integers(0, 99), t=st.integers(0, 99), data=st.data())
def test_sample_draws_different_clients_and_tracks_some_of_them(seed: int, t: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    sampled = data.draw(st.integers(1, count))
    tracked = data.draw(st.integers(0, sampled))
    clients, subset = sample(seed, t, count, sampled, tracked)
    assert clients == sorted(set(clients))
    assert len(clients) == sampled
    assert set(clients) <= set(range(count))
    assert subset == sorted(set(subset))
    assert len(subset) == tracked
    assert set(subset) <= set(clients)
    assert (clients, subset) == sample(seed, t, count, sampled, tracked)


def test_sample_is_uniform() -> None:
    """2,000 rounds of 3 out of 10, 1 of them tracked: each client 600 and 200 times, give or take 4 deviations."""
    drawn = [sample(0, t, 10, 3, 1) for t in range(2000)]
    for part, p in ((0, 0.3), (1, 0.1)):
        counts = torch.bincount(torch.tensor([client for pair in drawn for client in pair[part]]), minlength=10)
        assert float((counts - 2000 * p).abs().max()) < 4 * (2000 * p * (1 - p)) ** 0.5


def test_schedule_fixes_who_trains() -> None:
    problem = Lines()
    result = simulate(FEDAVG, problem, rounds=2, local_steps=1, schedule=[([3, 1], [1]), ([0], [])])
    assert [sorted(clients) for clients, _, _ in problem.calls] == [[1, 3], [0]]
    assert result.history[:, 0].tolist() == pytest.approx([0, -0.3, -0.4])


def test_schedule_sets_the_number_sampled() -> None:
    """PAdaMFed's rates depend on S."""
    who = [([3, 1], [1])] * 2
    given, implied = (
        simulate(load_algorithm("padamfed"), quadratic(), rounds=2, local_steps=2, schedule=who, **keys).x
        for keys in ({"clients_per_round": 2}, {})
    )
    assert torch.equal(given, implied)


def test_clients_take_their_own_number_of_steps() -> None:
    problem = Lines(steps=[1, 3, 2, 3])
    result = simulate(FEDAVG, problem, rounds=1, local_steps=3)
    assert problem.calls == [([1, 3, 2, 0], 0, 0), ([1, 3, 2], 0, 1), ([1, 3], 0, 2)]
    assert float(result.x) == pytest.approx(-0.1 * (1 * 1 + 2 * 3 + 3 * 2 + 4 * 3) / 4)


def test_weights_by_size() -> None:
    sizes = [4, 3, 2, 1]
    alg = load_algorithm("fedavg", lr=0.1, weights="size")
    result = simulate(alg, Lines(sizes=sizes), rounds=1, local_steps=1)
    assert float(result.x) == pytest.approx(-0.1 * (1 * 4 + 2 * 3 + 3 * 2 + 4 * 1) / 10)
    assert simulate(FEDAVG, Lines(sizes=sizes), rounds=1, local_steps=1).x == result.x, "FedAvg's default"
    alike = load_algorithm("fedavg", lr=0.1, weights="uniform")
    assert float(simulate(alike, Lines(sizes=sizes), rounds=1, local_steps=1).x) == pytest.approx(-0.1 * 2.5)


def test_gradients_are_clipped_to_a_global_norm() -> None:
    alg = load_algorithm("fedavg", lr=0.1, clip_norm=2.5)
    assert float(simulate(alg, Lines(), rounds=1, local_steps=1).x) == pytest.approx(-0.1 * (1 + 2 + 2.5 + 2.5) / 4)
    problem = quadratic(x0=torch.tensor([30.0, -20.0, 10.0], dtype=torch.float64))
    g = problem.full_gradient(problem.initial(), [2])[0]
    found = simulate(alg, problem, rounds=1, local_steps=1, schedule=[([2], [])])
    torch.testing.assert_close(found.x, problem.initial() - 0.1 * 2.5 * g / g.norm())


@pytest.mark.parametrize("cohort", [None, 1, 3])
def test_loss_is_the_mean_over_clients_of_their_mean_over_steps(cohort: int | None) -> None:
    problem = Lines(steps=[1, 3, 2, 3])
    result = simulate(FEDAVG, problem, rounds=2, local_steps=3, cohort=cohort)
    assert result.loss == pytest.approx([(0 + (10 + 1) + (20 + 0.5) + (30 + 1)) / 4] * 2)


def test_progress_counts_client_steps() -> None:
    problem, seen = Lines(steps=[1, 3, 2, 3]), []
    info = round_info(FEDAVG, problem, rounds=1, sampled=4, tracked=None, local_steps=3)
    plan = Plan(stacked_clients=2, progress=lambda done, total: seen.append((done, total)))
    run_round(Setup(FEDAVG, problem, info), start(Setup(FEDAVG, problem, info)), [0, 1, 2, 3], [], plan)
    assert seen == [(2, 9), (4, 9), (6, 9), (8, 9), (9, 9)]


def test_report_names_clients_and_bytes() -> None:
    alg, problem = load_algorithm("fadamgc"), quadratic()
    info = round_info(alg, problem, rounds=1, sampled=3, tracked=1, local_steps=1)
    report = run_round(Setup(alg, problem, info), start(Setup(alg, problem, info)), [0, 2, 4], [2])
    assert (report.clients, report.tracked, report.rejected) == ([0, 2, 4], [2], {})
    vector = 3 * 8
    assert report.bytes_down == 3 * 2 * vector  # x and y to each of the three
    assert report.bytes_up == (3 + 1) * vector  # d from each, y from the tracked one
    assert report.client_bytes == 4 * vector


def test_full_gradients_start_the_tracking_in_any_chunks() -> None:
    alg, problem = load_algorithm("fadamgc", tracking_init="gradient"), quadratic()
    expected = problem.full_gradient(problem.initial(), range(5))
    for cohort in (None, 2):
        result = simulate(alg, problem, rounds=0, local_steps=1, cohort=cohort)
        torch.testing.assert_close(result.clients["y"], expected)
        torch.testing.assert_close(result.server["y"], expected.mean(0))


def test_a_problem_without_full_gradients_says_who_needs_them() -> None:
    with pytest.raises(UserError, match=r"Lines.full_gradient: missing, and tracking_init=gradient needs it"):
        simulate(load_algorithm("fadamgc", tracking_init="gradient"), Lines(), rounds=1, local_steps=1)


# The problem.


def test_quadratic_gradient_is_that_of_its_objective() -> None:
    problem = quadratic()
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    for client in range(5):
        shift = x - problem.a[client]
        (expected,) = torch.autograd.grad(0.5 * shift @ problem.H[client] @ shift, x)
        torch.testing.assert_close(problem.gradient(x.detach()[None], [client], 0, 0)[0], expected)


def test_quadratic_optimum_has_no_mean_gradient() -> None:
    problem = quadratic()
    mean = problem.full_gradient(problem.optimum(), range(5)).mean(0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-14)


def test_noise_belongs_to_client_round_and_step_and_not_to_the_cohort() -> None:
    problem = quadratic(noise=1.0)
    X = torch.zeros(2, 3, dtype=torch.float64)
    noise = problem.gradient(X, [3, 1], 2, 1) - problem.full_gradient(X[0], [3, 1])
    alone = problem.gradient(X[:1], [1], 2, 1) - problem.full_gradient(X[0], [1])
    torch.testing.assert_close(noise[1:], alone)
    for other in ([1], 3, 1), ([1], 2, 2), ([4], 2, 1):
        assert not torch.allclose(problem.gradient(X[:1], *other) - problem.full_gradient(X[0], other[0]), alone)


# Clients that are rejected.


class Sick(Lines):
    """Client 2's gradients are not numbers from round 1 on."""

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        g = super().gradient(X, clients, round, step)
        return torch.where(torch.tensor([[client == 2 and round >= 1] for client in clients]), torch.nan, g)


def test_rejected_clients_are_warned_of_and_stand_in_the_result() -> None:
    why = "tensor 'd': 1 of 1 values are not finite"
    with pytest.warns(UserWarning, match=f"round 2: client 2 rejected: {why}"):
        result = simulate(FEDAVG, Sick(), rounds=2, local_steps=1)
    assert result.rejected == [{}, {2: why}]
    assert result.history[:, 0].tolist() == pytest.approx([0, -0.1 * 10 / 4, -0.1 * (10 / 4 + 7 / 3)])


# Starts.


def test_a_start_is_taken_over_into_the_problems_dtype() -> None:
    x0 = torch.tensor([0.1, 0.2, 0.3])
    assert simulate(FEDAVG, quadratic(), rounds=1, local_steps=1, x0=x0).history.dtype == torch.float64
    assert torch.equal(quadratic(x0=x0).initial(), x0.double())


@pytest.mark.parametrize("where", ["simulate", "problem"])
@pytest.mark.parametrize(
    ("x0", "found"),
    [
        (torch.zeros(4), r"\[4\] torch.float32"),
        (torch.zeros(1, 3), r"\[1, 3\] torch.float32"),
        (torch.zeros(3, dtype=torch.int64), r"\[3\] torch.int64"),
        ([0.0] * 3, "list"),
    ],
)
def test_a_start_that_does_not_fit_is_named(where: str, x0: object, found: str) -> None:
    start = quadratic if where == "problem" else partial(simulate, FEDAVG, quadratic(), rounds=1, local_steps=1)
    with pytest.raises(UserError, match=rf"x0: found {found}, expected \[3\] of floating-point numbers"):
        start(x0=x0)


# The most steps of a client, K.


@pytest.mark.parametrize("name", ["fedadamw", "padamfed"])
def test_the_most_steps_of_a_client_are_those_of_the_problem(name: str) -> None:
    alg, problem = load_algorithm(name), quadratic(local_steps=[4, 2, 4, 3, 1])
    few, right = (simulate(alg, problem, rounds=3, local_steps=count) for count in (1, 4))
    assert torch.equal(few.x, right.x)


def test_more_steps_in_a_later_round_are_an_error() -> None:
    class Growing(Lines):
        def steps(self, clients: Sequence[int], round: int) -> Tensor:
            return torch.tensor([2 + 3 * round if client == 1 else 2 for client in clients])

    with pytest.raises(UserError, match="client 1: has 5 local steps in round 2, expected at most 2, the most of this"):
        simulate(FEDAVG, Growing(), rounds=2, local_steps=1)


# What a problem may get wrong.


def graph(self: Lines, X: Tensor, *_: object) -> Tensor:
    return X.clone().requires_grad_() * 2


def in_place(self: Lines, X: Tensor, *_: object) -> Tensor:
    X -= 1
    return X


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("gradient", lambda self, X, *_: X[0], r"found \[1\] torch.float64, expected \[4, 1\] torch.float64, one row"),
        ("gradient", lambda self, X, *_: X[:1], r"found \[1, 1\] torch.float64, expected \[4, 1\] torch.float64"),
        ("gradient", lambda self, X, *_: X.sum(), r"found \[\] torch.float64, expected \[4, 1\] torch.float64"),
        ("gradient", lambda self, X, *_: X.float(), r"found \[4, 1\] torch.float32, expected \[4, 1\] torch.float64"),
        ("gradient", lambda self, X, *_: None, r"found NoneType, expected \[4, 1\] torch.float64"),
        (
            "gradient",
            graph,
            r"found \[4, 1\] torch.float64 with its graph, expected \[4, 1\] torch.float64, .* detached",
        ),
        ("gradient", in_place, r"changed X in place, expected it untouched; work on X.clone\(\)"),
        ("full_gradient", lambda self, x, clients: x, r"found \[1\] torch.float64, expected \[4, 1\] torch.float64"),
        ("initial", lambda self: torch.zeros(1, 1), r"found \[1, 1\] torch.float32, expected \[1\] of floating-point"),
        ("sizes", lambda self, clients: torch.ones(1), r"found \[1.0\], expected a tensor of 4 positive numbers"),
        ("sizes", lambda self, clients: [1] * 4, r"found \[1, 1, 1, 1\], expected a tensor of 4 positive numbers"),
        ("sizes", lambda self, clients: torch.tensor([1, 0, 1, 1]), r"found \[1, 0, 1, 1\], expected a tensor of 4"),
        (
            "steps",
            lambda self, clients, round: torch.ones(1),
            r"found \[1.0\], expected 4 whole numbers, one per client",
        ),
        (
            "steps",
            lambda self, clients, round: [1.5] * 4,
            r"found \[1.5, .*\], expected 4 whole numbers, one per client",
        ),
    ],
)
def test_a_method_that_gives_something_else_is_named(method: str, wrong: object, message: str) -> None:
    """Where each of these would otherwise run on other numbers, or fail far away."""
    mistaken = type("Mistaken", (Lines,), {method: wrong, "loss_and_gradient": Problem.loss_and_gradient})
    alg = load_algorithm("fadamgc", weights="size", tracking_init="gradient" if method == "full_gradient" else "zero")
    with pytest.raises(UserError, match=f"Mistaken.{method}: {message}"):
        simulate(alg, mistaken(), rounds=1, local_steps=1)


H, A = quadratic().H, quadratic().a


@pytest.mark.parametrize(
    ("arguments", "keys", "message"),
    [
        ((H[:3], A), {}, r"H: found \[3, 3, 3\] torch.float64, expected \[5, 3, 3\] torch.float64, as a \[5, 3\]"),
        ((H.float(), A), {}, r"H: found \[5, 3, 3\] torch.float32, expected \[5, 3, 3\] torch.float64"),
        ((H, A[0]), {}, r"a: found \[3\] torch.float64, expected \[N, d\] of floating-point numbers"),
        ((H, A), {"sizes": [1, 2]}, "sizes: found 2 numbers, expected 5, one per client"),
        ((H, A), {"local_steps": [1, 2]}, "local_steps: found 2 numbers, expected 5, one per client"),
    ],
)
def test_quadratics_that_do_not_fit_together(arguments: tuple, keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        QuadraticProblem(*arguments, **keys)


@pytest.mark.parametrize(("N", "d", "name"), [(0, 3, "num_clients"), (2.0, 3, "num_clients"), (2, 0, "dim")])
def test_random_quadratics_need_clients_and_coordinates(N: int, d: int, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: found .*, expected a whole number, 1 or more"):
        QuadraticProblem.random(N, d)


def test_blocks_of_another_size_are_named() -> None:
    problem = quadratic(blocks=BlockPartition.single(4))
    with pytest.raises(UserError, match=r"QuadraticProblem.blocks: found 4 coordinates, expected 3, its dim"):
        simulate(load_algorithm("fedadamw"), problem, rounds=1, local_steps=1)


# What a user may get wrong.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"alg": "fadamgc"}, "alg: found 'fadamgc', expected an algorithm, as load_algorithm"),
        ({"problem": None}, "problem: found None, expected an instance of a subclass of fedllm.Problem"),
        ({"rounds": 2.0}, "rounds: found 2.0, expected a whole number"),
        ({"clients_per_round": 2.0}, "clients_per_round: found 2.0, expected a whole number"),
        ({"seed": 1.5}, "seed: found 1.5, expected a whole number"),
        ({"seed": None}, "seed: found None, expected a whole number"),
    ],
)
def test_arguments_of_another_kind(keys: dict, message: str) -> None:
    arguments = {"alg": FEDAVG, "problem": quadratic(), "rounds": 2, "local_steps": 1}
    with pytest.raises(UserError, match=message):
        simulate(**{**arguments, **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"clients_per_round": 6}, "^clients_per_round: found 6, expected 1 to 5"),
        ({"clients_per_round": 0}, "^clients_per_round: found 0, expected 1 to 5"),
        ({"clients_per_round": 3, "tracked_per_round": 4}, "^tracked_per_round: found 4, expected 0 to 3"),
        ({"tracked_per_round": -1}, "^tracked_per_round: found -1, expected 0 to 5"),
        ({"local_steps": 0}, "^local_steps: found 0, expected 1 or more"),
        ({"schedule": [([0], [])]}, "schedule: found 1 rounds, expected 2"),
        ({"schedule": [([0], []), ([5], [])]}, r"schedule\[1\]: found clients \[5\], expected different ones of 0..4"),
        ({"schedule": [([0, 0], []), ([1], [])]}, r"schedule\[0\]: found clients \[0, 0\], expected different"),
        ({"schedule": [([], []), ([1], [])]}, r"schedule\[0\]: found clients \[\], expected different"),
        ({"schedule": [[0, 1], [1, 2]]}, r"schedule\[0\]: found \[0, 1\], expected two lists of whole numbers, \(cl"),
        ({"schedule": [([0.7, 1], []), ([1], [])]}, r"schedule\[0\]: found \(\[0.7, 1\], \[\]\), expected two lists"),
        ({"eval_every": 0}, "eval_every: found 0, expected 1 or more"),
        ({"rounds": -1}, "rounds: found -1, expected 0 or more"),
        ({"cohort": 0}, "stacked_clients: found 0, expected 1 or more"),
        ({"schedule": [([0], [1]), ([1], [])]}, r"schedule\[0\]: found tracked \[1\], expected some of its clients"),
    ],
)
def test_numbers_that_do_not_fit_the_federation(keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(FEDAVG, quadratic(), **{"rounds": 2, "local_steps": 1, **keys})


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("dim", None, r"Lines.dim: missing; set self.dim in __init__: d, the number of coordinates"),
        (
            "num_clients",
            None,
            r"Lines.num_clients: missing; set self.num_clients in __init__: N, the",
        ),
        ("dim", 2.0, r"Lines.dim: found 2.0, expected d, the number of coordinates, 1 or more"),
        ("num_clients", 0, r"Lines.num_clients: found 0, expected N, the number of clients, 1 or more"),
    ],
)
def test_a_problem_without_its_counts_is_named(attribute: str, value: object, message: str) -> None:
    problem = Lines()
    setattr(problem, attribute, value)
    with pytest.raises(UserError, match=message):
        simulate(FEDAVG, problem, rounds=1, local_steps=1)


# What a simulation records.


def test_evaluations_are_recorded_every_few_rounds_and_after_the_last_one() -> None:
    problem = quadratic()
    seen: list[Tensor] = []

    def evaluate(x: Tensor, round: int) -> dict[str, float]:
        seen.append(x.clone())
        x.zero_()  # a copy: the simulation goes on from its own
        return {"twice": 2.0 * round}

    plain = simulate(FEDAVG, problem, rounds=5, local_steps=2)
    found = simulate(FEDAVG, problem, rounds=5, local_steps=2, evaluate=evaluate, eval_every=2, keep_history=False)
    assert found.evaluations == [{"round": t, "twice": 2.0 * t} for t in (2, 4, 5)]
    assert plain.evaluations == []
    assert torch.equal(torch.stack(seen), plain.history[[2, 4, 5]])
    assert torch.equal(found.x, plain.x)
    assert found.history.shape == (0, problem.dim)
    with pytest.raises(UserError, match=r"evaluate: found float, expected a dict such as"):
        simulate(FEDAVG, problem, rounds=1, local_steps=1, evaluate=lambda x, round: 0.5)


def test_a_client_without_steps_is_named() -> None:
    with pytest.raises(UserError, match="client 2: has 0 local steps in round 1, expected at least 1"):
        simulate(FEDAVG, Lines(steps=[1, 1, 0, 1]), rounds=1, local_steps=1)


@pytest.mark.parametrize("schedule", ["linear", "cosine_rounds"])
@pytest.mark.parametrize("index", [-1, 3, 7])
def test_rounds_past_the_end_have_no_rate(schedule: str, index: int) -> None:
    alg = load_algorithm("scaffold", lr=0.1, schedule=schedule)
    info = round_info(alg, quadratic(), rounds=3, sampled=2, tracked=2, local_steps=2)
    with pytest.raises(UserError, match=rf"round {index} \(from 0\): schedule {schedule} expects 0 to 2"):
        alg.rates(torch.tensor([2]), replace(info, index=index))


def test_a_diverging_run_stops_with_a_reason() -> None:
    with pytest.raises(RunError, match=r"round \d+: (the aggregated model is not finite|0 accepted uploads)"):
        simulate(load_algorithm("fedavg", lr=1e6), quadratic(), rounds=60, local_steps=3)


@dataclass(frozen=True, kw_only=True)
class Rebinding(Algorithm):
    """A step that makes a new tensor where it must change the old one."""

    def step(self, local: State, g: Tensor, k: int, eta: Tensor, info: RoundInfo) -> None:
        local["x"] = local["x"] - eta * g


def test_a_step_that_rebinds_is_an_error_and_not_a_lost_step() -> None:
    with pytest.raises(UserError, match=r"Rebinding.step: replaced local\['x'\], expected it changed in place"):
        simulate(Rebinding(), quadratic(), rounds=1, local_steps=1)


# The package.


def test_the_package_lists_its_names() -> None:
    import fedllm

    assert {*fedllm.__all__, "__version__"} <= set(dir(fedllm))
    assert fedllm.UserError is UserError
    assert fedllm.RunError is RunError
