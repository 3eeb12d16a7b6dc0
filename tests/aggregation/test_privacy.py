"""Client-level privacy: the noise on the sums, what one client can change, and what the server hands on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import Problem, QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.accounting import full_epsilon
from fedllm.aggregation.clipping import Clip
from fedllm.aggregation.compression import SCALE
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy import from_system, noise_length
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms import Algorithm, algorithm_names
from fedllm.algorithms.base import RoundInfo, Rows
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState

N, S = 10, 4
MANY = 200_000


class Still(Problem):
    """N clients whose gradients are 0, but for those of client 0, which are `push` in the first coordinate."""

    def __init__(self, dim: int, push: float = 0.0, clients: int = N) -> None:
        self.num_clients, self.dim, self.blocks, self.push = clients, dim, None, push

    def initial(self) -> Tensor:
        return torch.zeros(self.dim)

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        g = torch.zeros_like(X)
        g[:, 0] = torch.tensor([self.push if client == 0 else 0.0 for client in clients])
        return g


def private(name: str, problem: Problem, clip: Any = 1.0, noise: float = 1.0, bits: Any = "float32") -> Setup:
    algorithm = load_algorithm(name, weights="uniform", lr=0.1)
    info = round_info(algorithm, problem, rounds=20, sampled=S, tracked=S, local_steps=2)
    pipeline = Pipeline.of(UploadsSettings(clip=clip, bits=bits), algorithm, 0, privacy=PrivacySettings(noise=noise))
    return Setup(algorithm, problem, info, pipeline)


def quadratic(name: str, **given: Any) -> Setup:
    return private(name, QuadraticProblem.random(num_clients=N, dim=30, spread=2.0, noise=0.1), **given)


def trained(setup: Setup, rounds: int = 3, plan: Plan | None = None) -> FederationState:
    state = start(setup)
    for t in range(rounds):
        run_round(setup, state, *sample(0, t, N, S, S), plan)
    return state


def assert_normal(values: Tensor, deviation: float) -> None:
    """Mean and variance of independent normal values, at a level of 1e-4."""
    n, scaled = len(values), values.double() / deviation
    assert abs(float(scaled.sum())) < 3.9 * math.sqrt(n)
    assert abs(float(scaled.square().sum()) - n) < 3.9 * math.sqrt(2 * n)


@pytest.mark.slow
def test_the_noise_of_rounds_is_normal_and_independent() -> None:
    """Without gradients x moves by the noise alone: z sqrt(m) C / S in each round and coordinate, m = 1."""
    given = {"rounds": 4, "local_steps": 1, "clients_per_round": S, "uploads": UploadsSettings(clip=0.5)}
    noise = {"privacy": PrivacySettings(noise=1.5), "progress": False}
    algorithm = load_algorithm("fedavg", weights="uniform")
    found, again, other = (simulate(algorithm, Still(MANY), **given, **noise, seed=seed) for seed in (0, 0, 1))
    deviation = 1.5 * 0.5 / S
    assert_normal(found.x, math.sqrt(4) * deviation)
    steps = found.history.diff(dim=0).double() / deviation
    for row in steps:
        assert_normal(row, 1.0)
    for one, two in ((0, 1), (1, 2), (0, 3)):
        assert abs(float(steps[one] @ steps[two])) < 3.9 * math.sqrt(MANY)
    assert torch.equal(found.x, again.x)
    assert abs(float(found.x.double() @ other.x.double())) < 3.9 * 4 * deviation**2 * math.sqrt(MANY)


def test_two_vectors_have_noise_by_their_own_clips() -> None:
    """m = 2: z sqrt(2) C_k. d is divided by S; the sum of the changes of y by N, in FAdamGC's server."""
    state = trained(private("fadamgc", Still(MANY), clip={"d": 1.0, "y": 0.1}), rounds=1)
    assert_normal(state.x, math.sqrt(2) * 1.0 / S)
    assert_normal(state.server["y"], math.sqrt(2) * 0.1 / N)
    assert noise_length(1.0, 0.1, 2, MANY, S) == pytest.approx(math.sqrt(2 * MANY) * 0.1 / S)


def test_the_systems_noise_is_normal_and_never_the_same() -> None:
    one, two = from_system("d", 0, MANY + 1), from_system("d", 0, MANY + 1)
    assert_normal(one, 1.0)
    assert abs(float(one @ two)) < 3.9 * math.sqrt(MANY)
    assert one.dtype == torch.float64
    assert len(from_system("d", 0, (1 << 20) + 3)) == (1 << 20) + 3


def test_stacked_clients_and_parts_change_rounding_at_most() -> None:
    whole = trained(quadratic("scaffold"))
    for plan in (Plan(stacked_clients=1), Plan(parts=3)):
        assert torch.allclose(trained(quadratic("scaffold"), plan=plan).x, whole.x, rtol=0, atol=1e-12)


def test_without_noise_privacy_changes_nothing_but_the_denominator() -> None:
    setup = quadratic("scaffold", noise=0.0, clip=0.1)
    plain = Setup(setup.algorithm, setup.problem, setup.info, Pipeline.of(setup.pipeline.settings, setup.algorithm, 0))
    assert torch.equal(trained(setup).x, trained(plain).x)
    one, of_one = start(setup), start(plain)
    run_round(setup, one, [3], [3])
    run_round(plain, of_one, [3], [3])
    assert torch.allclose(one.x * S, of_one.x)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["float32", "int8", "int4"])
def test_no_client_changes_a_sum_by_more_than_its_clip(bits: Any) -> None:
    """1,000 liars: what the server reads of any tensors of the right shapes has norm at most C_k (1 + 1e-6)."""
    dim, clips = 300, {"d": 0.7, "y": 0.02}
    algorithm = load_algorithm("fadamgc")
    info = RoundInfo(0, 5, N, S, S, 2, BlockPartition.elementwise(dim))
    declared = Declared.by(algorithm, torch.zeros(dim), info)
    pipeline = Pipeline.of(UploadsSettings(clip=clips, bits=bits), algorithm, 0, privacy=PrivacySettings(noise=1.0))
    draw = torch.Generator().manual_seed(1)
    everyone = Rows(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    counted = 0
    for attempt in range(1000):
        reduction = pipeline.reduction(algorithm, declared, info, torch.device("cpu"))
        lies = {name: lie(bits, dim, attempt, draw) for name in clips}
        tensors = {name + suffix: value for name, parts in lies.items() for suffix, value in parts.items()}
        vectors = pipeline.read(tensors, declared)
        assert not isinstance(vectors, str), vectors
        uploads = Uploads(vectors, {})
        pipeline.receive(uploads, declared, 1)
        if accepted := uploads.accepted(1):
            reduction.add(uploads, everyone, accepted, torch.ones(1, dtype=torch.float64))
            counted += 1
        for name, clip in clips.items():
            assert float(reduction.sums[name].norm()) <= clip * (1 + 1e-6)
    assert 0 < counted < 1000


def lie(bits: str, dim: int, attempt: int, draw: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a vector: noise of any size, and now and then a value that is not finite."""
    size = 10.0 ** float(torch.randint(-3, 30, (1,), generator=draw))
    bad = (math.nan, math.inf)[attempt % 2] if attempt % 7 == 0 else 1.0
    if bits == "float32":
        return {"": size * bad * torch.randn(1, dim, generator=draw)}
    shape, least, dtype = ((1, dim), -128, torch.int8) if bits == "int8" else ((1, -(-dim // 2)), 0, torch.uint8)
    codes = torch.randint(least, least + 256, shape, generator=draw).to(dtype)
    return {"": codes, SCALE: size * bad * torch.randn(1, 2, generator=draw)}


def test_an_upload_that_is_not_finite_adds_nothing_and_is_still_counted() -> None:
    """A client with NaN is rejected; the others' sum is divided by S as before, and the run goes on."""
    setup = private("fedavg", Still(5, push=math.nan), noise=0.0)
    state = start(setup)
    report = run_round(setup, state, [0, 1, 2, 3], [])
    assert list(report.rejected) == [0]
    assert bool(torch.isfinite(state.x).all())
    alone = run_round(setup, state, [0], [])
    assert list(alone.rejected) == [0]
    assert state.round == 2
    assert alone.drift["update_norm"] is None


@pytest.mark.parametrize("name", [name for name in algorithm_names() if name != "qfedavg"])
def test_every_algorithm_runs_under_privacy(name: str) -> None:
    """All N clients in each round, as FA-NT's derived form wants it."""
    problem = QuadraticProblem.random(num_clients=N, dim=30, spread=2.0, noise=0.1)
    given: dict[str, Any] = {"uploads": UploadsSettings(clip=0.5), "privacy": PrivacySettings(noise=1.0)}
    algorithm = load_algorithm(name, weights="uniform", lr=0.05)
    done = simulate(algorithm, problem, rounds=4, local_steps=2, **given, progress=False)
    assert bool(torch.isfinite(done.x).all())
    assert not any(done.rejected)
    for vector in algorithm.nonnegative:
        held = {"vhat": "v"}.get(vector, vector)
        if held in done.server:
            assert float(done.server[held].min()) == 0.0, "some of the noised means were negative"


def test_second_moments_are_declared_nonnegative() -> None:
    declared = {name: load_algorithm(name).nonnegative for name in algorithm_names()}
    assert {name: names for name, names in declared.items() if names} == {
        "fedadamw": ("vbar",), "fadamgc_b": ("vbar",), "fedlada": ("vhat",), "localadamw": ("v",)
    }  # fmt: skip


def test_the_server_hands_on_no_number_of_clients() -> None:
    """Reduced has S and K steps' rates, whoever came."""
    setup = quadratic("fedcm", noise=0.0).at(0)
    seen: list[Any] = []

    class Spy(type(setup.algorithm)):  # type: ignore[misc]
        def aggregate(self, x: Tensor, server: Any, reduced: Any, info: Any) -> Any:
            seen.append(reduced)
            return super().aggregate(x, server, reduced, info)

    spy = Spy(weights="uniform", lr=0.1)
    setup = Setup(
        spy, setup.problem, setup.info, Pipeline.of(setup.pipeline.settings, spy, 0, privacy=PrivacySettings(noise=0))
    )
    run_round(setup, start(setup), [1], [1])
    assert (seen[0].clients, seen[0].tracked) == (S, S)
    assert seen[0].rate_sum == pytest.approx(0.2)


@pytest.mark.slow
def test_a_canary_is_found_no_better_than_epsilon_says() -> None:
    """One client adds a vector of norm C or nothing, in 1,000 runs each. The likelihood test's lower bound on epsilon
    stays below what is printed and above a tenth of it; with a quarter of the noise it does not stay below."""
    delta = 1e-3
    printed = full_epsilon(1.0, 1, delta)
    found = _lower_bound(1.0, delta, 1000)
    assert 0.1 * printed < found < printed
    assert _lower_bound(0.25, delta, 400) > printed


def _lower_bound(noise: float, delta: float, runs: int) -> float:
    """ln((TPR - delta)/FPR) with bounds of 99 % on both rates, at the best of a few thresholds (Hoeffding's bound)."""

    def moved(push: float, rounds: range) -> Tensor:
        """x after one round from 0, whose noise is that of each of these rounds."""
        setup, found = private("fedavg", Still(1, push), noise=noise), []
        for t in rounds:
            state = start(setup)
            state.round = t
            run_round(setup, state, [0], [0])
            found.append(state.x * S)
        return torch.cat(found)

    # The gradient pushes x down by C: a run with the canary ends lower.
    absent, there = moved(0.0, range(runs)), moved(50.0, range(runs, 2 * runs))
    best = 0.0
    for threshold in torch.linspace(-3.0, 1.0, 9).tolist():
        hits, alarms = float((there < threshold).double().mean()), float((absent < threshold).double().mean())
        low, high = _bounds(hits, runs)[0], _bounds(alarms, runs)[1]
        if low > delta:
            best = max(best, math.log((low - delta) / high))
    return best


def _bounds(rate: float, runs: int) -> tuple[float, float]:
    """Wilson's interval at 99 %."""
    z = 2.576
    middle, half = rate + z * z / 2 / runs, z * math.sqrt(rate * (1 - rate) / runs + z * z / 4 / runs**2)
    return (middle - half) / (1 + z * z / runs), (middle + half) / (1 + z * z / runs)


@pytest.mark.parametrize(
    ("name", "keys", "uploads", "message"),
    [
        ("fadamgc", {}, {"clip": {"d": 1.0}}, r"FAdamGC sends d and y, and uploads.clip has no norm for y; give one"),
        ("fedadamw", {}, {}, r"FedAdamW sends d and vbar, and uploads.clip has no norm for d and vbar"),
        ("qfedavg", {}, {"clip": 1.0}, r"found QFedAvg, whose clients send numbers made of their loss"),
        ("fedavg", {"weights": "size"}, {"clip": 1.0}, r"found algorithm.weights=size, expected uniform"),
        ("fadamgc", {"tracking_init": "gradient"}, {"clip": 1.0}, r"found algorithm.tracking_init=gradient"),
    ],
)
def test_what_is_not_bounded_is_refused(name: str, keys: Any, uploads: Any, message: str) -> None:
    algorithm: Algorithm = load_algorithm(name, **keys)
    with pytest.raises(UserError, match=message):
        Pipeline.of(UploadsSettings(**uploads), algorithm, 0, privacy=PrivacySettings(noise=1.0))


def test_simulate_wants_the_noise_itself() -> None:
    with pytest.raises(UserError, match=r"privacy.noise: missing; fedllm.aggregation.accounting.noise_for finds it"):
        simulate(
            load_algorithm("fedcm"), Still(3), rounds=1, local_steps=1, uploads=UploadsSettings(clip=1.0),
            privacy=PrivacySettings(epsilon=8.0, delta=1e-4),
        )  # fmt: skip


def test_the_norm_of_a_long_vector_is_exact() -> None:
    rows = torch.randn(1, 10_000_000, generator=torch.Generator().manual_seed(0))
    uploads = Uploads({"d": rows}, {})
    Clip({"d": 2.0}).receive(uploads, Declared({"d": rows.shape[1]}, {}, rows.dtype), 1)
    norm = float(torch.linalg.vector_norm(uploads.sent["d"], dtype=torch.float64))
    assert abs(norm - 2.0) <= 2e-6
