"""What every algorithm must keep to; found through algorithm_names(), so a new file in fedllm/algorithms is tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.algorithms import Algorithm, algorithm_class, algorithm_names, canonical_name
from fedllm.algorithms.base import Reduced, RoundInfo, Rows
from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import whole
from fedllm.common.errors import RunError, UserError
from fedllm.common.schema import keys as settings_keys
from fedllm.common.tensors import State
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState

N, DIM, K = 7, 6, 3
STEPS = [3, 1, 2, 3, 3, 2, 1]
BLOCKS = BlockPartition((whole("a", "tensor", 1), whole("b", "tensor", 3), whole("c", "tensor", 2)))
VARIANTS = [
    ("localadam", {"second_moment": "reset"}),
    *(("localadamw", {"aggregate": name}) for name in ("m", "v", "vm", "mean_v")),
    *(("fadamgc", {"local": name}) for name in ("rmsprop", "adamw")),
    ("fadamgc", {"tracking_init": "gradient"}),
    ("fadamgc_b", {"tracking_init": "gradient"}),
    ("fedadamw", {"form": "alg3"}),
    ("fedadamw", {"aggregate_v": False}),
    ("fedams", {"option": 1}),
]
EVERY = [(name, {}) for name in algorithm_names()] + VARIANTS
every_algorithm = pytest.mark.parametrize(("name", "options"), EVERY, ids=lambda value: str(value) or "default")


def load(name: str, options: dict) -> Algorithm:
    return load_algorithm(name, lr=0.05, **options)


def problem(dtype: torch.dtype = torch.float64, **options: object) -> QuadraticProblem:
    base = QuadraticProblem.random(N, DIM, seed=3, spread=2.0)
    arguments = {"noise": 0.3, "local_steps": STEPS, "blocks": BLOCKS, "x0": torch.linspace(-1, 1, DIM).to(dtype)}
    return QuadraticProblem(base.H.to(dtype), base.a.to(dtype), **(arguments | options))  # type: ignore[arg-type]


def info_of(alg: Algorithm, rounds: int = 60) -> RoundInfo:
    return round_info(alg, problem(), rounds=rounds, sampled=4, tracked=2, local_steps=K)


def advanced(alg: Algorithm, rounds: int = 2) -> tuple[QuadraticProblem, RoundInfo, FederationState]:
    """A federation whose every vector has been written."""
    task, info = problem(), info_of(alg)
    federation = start(Setup(alg, task, info))
    for t in range(rounds):
        clients, tracked = sample(0, t, N, 4, 2)
        run_round(Setup(alg, task, info), federation, clients, tracked)
    return task, replace(info, index=rounds), federation


def assert_same(found: State, expected: State) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def rows_for(alg: Algorithm, info: RoundInfo, count: int) -> tuple[Rows, Tensor]:
    rates = alg.rates(torch.full((count,), K), info)
    tracked = torch.arange(count)[:, None] % 2 == 0
    return Rows(torch.full((count, 1), float(K), dtype=torch.float64), rates.sum(1, keepdim=True), tracked), rates


def local_round(
    alg: Algorithm, info: RoundInfo, x: Tensor, server: State, clients: State, rows: Rows, rates: Tensor
) -> tuple[State, State]:
    """begin, K steps on fixed gradients, end."""
    local, count = alg.begin(x, server, clients, info), range(len(x))
    for k in range(K):
        g = torch.sin(torch.arange(x.numel(), dtype=x.dtype) + k).view_as(x)
        if contrast := alg.contrast(local):
            plain = problem().gradient(local["x"], count, 0, k)
            g += problem().contrastive_gradient(local["x"], contrast, count, 0, k)[1] - plain
        alg.step(local, g, k + 1, rates[:, k : k + 1], info)
    return alg.end(local, x, server, clients, rows, info)


def test_all_twenty_one_are_found() -> None:
    assert algorithm_names() == [
        "fa_nt", "fadamgc", "fadamgc_b", "fedadagrad", "fedadam", "fedadamw", "fedams", "fedavg", "fedavgm", "fedcm",
        "feddyn", "fedlada", "fedprox", "fedyogi", "localadam", "localadamw", "moon", "padamfed", "qfedavg",
        "scaffold", "scaffoldm",
    ]  # fmt: skip


def test_aliases_are_unique_and_load_their_class() -> None:
    aliases = [(alias, name) for name in algorithm_names() for alias in algorithm_class(name).aliases]
    assert len({alias for alias, _ in aliases} | set(algorithm_names())) == len(aliases) + 21
    for alias, name in aliases:
        assert algorithm_class(alias) is algorithm_class(name)
    promised = {"fadamgt": "fadamgc", "fadamet": "fa_nt", "fedit_adamet": "fa_nt", "fedit_adam": "localadam"}
    assert promised.items() <= dict(aliases).items()


@pytest.mark.parametrize("name", algorithm_names())
def test_every_class_says_what_it_is(name: str) -> None:
    cls = algorithm_class(name)
    assert cls.__bases__ == (Algorithm,)
    assert cls.paper
    assert "x_i -= eta" in (cls.__doc__ or "")
    for field in fields(cls):
        assert field.metadata["help"], field.name


# The four moments.


@every_algorithm
def test_only_step_changes_anything_in_place(name: str, options: dict) -> None:
    alg = load(name, options)
    _, info, federation = advanced(alg)
    x = federation.x.expand(3, -1)
    server, clients = federation.server, federation.clients.get([0, 1, 2])
    rows, rates = rows_for(alg, info, 3)
    before = copied({"x": federation.x}), copied(server), copied(clients)

    local = alg.begin(x, server, clients, info)
    assert all(value.shape[0] == 3 for value in local.values())
    for k in range(K):
        g = torch.randn(3, DIM, dtype=torch.float64)
        kept, tensors, start_x = g.clone(), dict(local), local["x"].clone()
        alg.step(local, g, k + 1, rates[:, k : k + 1], info)
        assert torch.equal(g, kept)
        assert all(local[key] is tensors[key] for key in tensors)
        assert set(local) == set(tensors)
        assert not torch.equal(local["x"], start_x)
    snapshot = copied(local)
    upload, _ = alg.end(local, x, server, clients, rows, info)
    assert_same(local, snapshot)
    mean = {key: upload[key].mean(0) for key in alg.uploads()}
    total = {key: upload[key].sum(0) for key in alg.tracked_uploads()}
    reduced = Reduced(copied(mean), copied(total), float(rows.rate_sum.mean()), 3, 2)
    alg.aggregate(federation.x, server, reduced, info)
    assert_same(reduced.mean, mean)
    assert_same(reduced.total, total)
    for found, expected in zip(({"x": federation.x}, server, clients), before, strict=True):
        assert_same(found, expected)


@every_algorithm
def test_shapes_are_the_declared_ones(name: str, options: dict) -> None:
    alg = load(name, options)
    _, info, federation = advanced(alg)
    length = {"d": DIM, "B": BLOCKS.num_blocks, "1": 1}

    def check(state: State, declared: dict, rows: tuple[int, ...]) -> None:
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            key: (*rows, length[of]) for key, of in declared.items()
        }

    x = federation.x
    check(alg.init_server(x, info), dict(alg.server_vectors()), ())
    check(alg.init_clients(x.expand(3, -1), info), dict(alg.client_vectors()), (3,))
    rows, rates = rows_for(alg, info, 3)
    clients = federation.clients.get([0, 1, 2])
    upload, state = local_round(alg, info, x.expand(3, -1), federation.server, clients, rows, rates)
    check(upload, {**alg.uploads(), **alg.tracked_uploads()}, (3,))
    check(state, dict(alg.client_vectors()), (3,))
    check(federation.server, dict(alg.server_vectors()), ())
    assert not set(alg.uploads()) & set(alg.tracked_uploads())
    assert set(alg.derivable) <= set(alg.downloads())


@every_algorithm
def test_untracked_clients_send_no_change(name: str, options: dict) -> None:
    alg = load(name, options)
    _, info, federation = advanced(alg)
    rows, rates = rows_for(alg, info, 3)
    clients = federation.clients.get([0, 1, 2])
    upload, state = local_round(alg, info, federation.x.expand(3, -1), federation.server, clients, rows, rates)
    for key in alg.tracked_uploads():
        assert torch.equal(upload[key][1], torch.zeros(DIM, dtype=torch.float64))
        assert torch.equal(state[key][1], clients[key][1])
        assert torch.equal(upload[key][[0, 2]], state[key][[0, 2]] - clients[key][[0, 2]])
        assert bool((upload[key][[0, 2]] != 0).all())


@every_algorithm
def test_a_client_needs_its_downloads_and_nothing_else(name: str, options: dict) -> None:
    alg = load(name, options)
    _, info, federation = advanced(alg)
    rows, rates = rows_for(alg, info, 3)
    x, clients = federation.x.expand(3, -1), federation.clients.get([0, 1, 2])
    sent = {key: federation.server[key] for key in alg.downloads()}
    upload, state = local_round(alg, info, x, sent, clients, rows, rates)
    whole_upload, whole_state = local_round(alg, info, x, federation.server, clients, rows, rates)
    assert_same(upload, whole_upload)
    assert_same(state, whole_state)
    for key in sent:
        changed, _ = local_round(alg, info, x, {**sent, key: sent[key] + 0.1}, clients, rows, rates)
        assert not torch.equal(changed["d"], upload["d"]), f"{key} is sent and not used"
    for key in clients:
        changed, _ = local_round(alg, info, x, sent, {**clients, key: clients[key] + 0.1}, rows, rates)
        assert not torch.equal(changed["d"], upload["d"]), f"{key} is kept and not used"


# Whole runs.


@every_algorithm
def test_cohorts_leave_no_trace(name: str, options: dict) -> None:
    alg = load(name, options)
    runs = [
        simulate(alg, problem(), rounds=5, local_steps=K, clients_per_round=5, tracked_per_round=3, cohort=cohort)
        for cohort in (None, 1, 3)
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.history, runs[0].history, rtol=1e-12, atol=1e-12)
        for found, expected in ((run.server, runs[0].server), (run.clients, runs[0].clients)):
            for key in expected:
                torch.testing.assert_close(found[key], expected[key], rtol=1e-12, atol=1e-12)


@every_algorithm
def test_degenerate_inputs_give_finite_results(name: str, options: dict) -> None:
    """One client; one sampled; one step; no gradient with eps = 0; nobody tracked; b2 = 0."""
    known = set(settings_keys(algorithm_class(name)))
    zero = {"eps": 0.0} if "eps" in known else {}
    betas = [{}, {"betas": [0.9, 0.0]}] if "betas" in known else [{}]
    nothing = problem(noise=0.0)
    flat = QuadraticProblem(torch.zeros_like(nothing.H), nothing.a, x0=nothing.initial(), blocks=BLOCKS)
    single = QuadraticProblem(nothing.H[:1], nothing.a[:1], blocks=BLOCKS)
    for keys in betas:
        alg = load(name, {**options, **zero, **keys})
        still = simulate(alg, flat, rounds=3, local_steps=2, tracked_per_round=0)
        decayed = simulate(replace(alg, weight_decay=0.0), flat, rounds=3, local_steps=2)
        assert bool(torch.isfinite(still.x).all())
        assert torch.equal(decayed.x, flat.initial())
        assert bool(torch.isfinite(simulate(alg, single, rounds=3, local_steps=1).x).all())
        few = simulate(alg, problem(), rounds=4, local_steps=K, clients_per_round=1, tracked_per_round=0)
        assert bool(torch.isfinite(few.x).all())


@every_algorithm
def test_float32_stays_float32_and_agrees(name: str, options: dict) -> None:
    alg = load(name, options)

    def run(dtype: torch.dtype) -> State:
        exact = problem(dtype, noise=0.0)
        result = simulate(alg, exact, rounds=4, local_steps=K, clients_per_round=4, tracked_per_round=2)
        kept = {f"client {key}": value for key, value in result.clients.items()}
        return {"x": result.x, **result.server, **kept}

    single, double = run(torch.float32), run(torch.float64)
    for key, value in single.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), double[key], rtol=2e-3, atol=2e-5)


@every_algorithm
def test_resumed_equals_uninterrupted_bit_for_bit(name: str, options: dict, tmp_path: Path) -> None:
    alg, total, stop = load(name, options), 6, 3

    def rounds(federation: FederationState, first: int, last: int) -> None:
        for t in range(first, last):
            clients, tracked = sample(0, t, N, 4, 2)
            run_round(Setup(alg, problem(), info_of(alg, total)), federation, clients, tracked, Plan(stacked_clients=3))

    whole_run = start(Setup(alg, problem(), info_of(alg, total)))
    rounds(whole_run, 0, total)

    interrupted = start(Setup(alg, problem(), info_of(alg, total)))
    rounds(interrupted, 0, stop)
    tensors = {"x": interrupted.x, **{f"server.{key}": value for key, value in interrupted.server.items()}}
    for client, state in interrupted.clients.known().items():
        tensors |= {f"client.{client}.{key}": value for key, value in state.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "state.safetensors")

    loaded = load_file(tmp_path / "state.safetensors")
    resumed = start(Setup(alg, problem(), info_of(alg, total)))
    resumed.round, resumed.x = stop, loaded["x"]
    resumed.server = {key: loaded[f"server.{key}"] for key in alg.server_vectors()}
    for client in interrupted.clients.known():
        row = {key: loaded[f"client.{client}.{key}"][None] for key in alg.client_vectors()}
        resumed.clients.put([client], row)
    rounds(resumed, stop, total)
    assert torch.equal(resumed.x, whole_run.x)
    assert_same(resumed.server, whole_run.server)
    assert_same(resumed.clients.get(range(N)), whole_run.clients.get(range(N)))


class Poisoned(QuadraticProblem):
    """Client 2's gradients are not numbers from round 1 on."""

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        g = super().gradient(X, clients, round, step)
        sick = torch.tensor([[int(client) == 2 and round >= 1] for client in clients])
        return torch.where(sick, torch.nan, g)


def poisoned() -> Poisoned:
    healthy = problem()
    return Poisoned(healthy.H, healthy.a, x0=healthy.initial(), noise=0.3, local_steps=STEPS, blocks=BLOCKS)


@every_algorithm
def test_a_client_that_sends_nan_counts_nowhere(name: str, options: dict) -> None:
    alg, task = load(name, options), poisoned()
    info = round_info(alg, task, rounds=2, sampled=3, tracked=3, local_steps=K)
    federation, without = start(Setup(alg, task, info)), start(Setup(alg, task, info))
    for each in (federation, without):
        run_round(Setup(alg, task, info), each, [1, 2, 3], [1, 2, 3])
    before = copied(federation.clients.get([2]))
    report = run_round(Setup(alg, task, info), federation, [0, 2, 5], [2, 5])
    run_round(Setup(alg, task, info), without, [0, 5], [5])
    assert list(report.rejected) == [2]
    assert "not finite" in report.rejected[2]
    assert_same(federation.clients.get([2]), before)
    torch.testing.assert_close(federation.x, without.x, rtol=1e-12, atol=1e-12)
    for key in alg.tracked_uploads():
        mean = federation.clients.get(range(N))[key].mean(0)
        torch.testing.assert_close(federation.server[key], mean, rtol=1e-12, atol=1e-12)


@every_algorithm
def test_too_few_healthy_clients_stop_the_run_and_change_nothing(name: str, options: dict) -> None:
    alg, task = load(name, options), poisoned()
    info = round_info(alg, task, rounds=2, sampled=3, tracked=3, local_steps=K)
    federation = start(Setup(alg, task, info))
    run_round(Setup(alg, task, info), federation, [1, 2, 3], [1, 2, 3])
    x, server, clients = federation.x.clone(), copied(federation.server), copied(federation.clients.get(range(N)))
    with pytest.raises(RunError, match=r"2 accepted uploads, min_clients asks for 3[\s\S]*client 2"):
        run_round(Setup(alg, task, info), federation, [0, 2, 5], [2, 5], Plan(min_clients=3))
    assert federation.round == 1
    assert torch.equal(federation.x, x)
    assert_same(federation.server, server)
    assert_same(federation.clients.get(range(N)), clients)


# What a user may get wrong.


@pytest.mark.parametrize("name", algorithm_names())
def test_an_unknown_key_is_named_with_the_known_ones(name: str) -> None:
    with pytest.raises(UserError, match=r"algorithm.server_rl: unknown key \(did you mean 'server_lr'\?\)") as error:
        load_algorithm(name, server_rl=1.0)
    for key in settings_keys(algorithm_class(name)):
        assert key in str(error.value)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        *((name, {"lr": 0.0}, "algorithm.lr: found 0.0, expected a positive number") for name in algorithm_names()),
        *((name, {"server_lr": -1}, "algorithm.server_lr: found -1.0, expected") for name in algorithm_names()),
        ("fedavg", {"weight_decay": -0.1}, "algorithm.weight_decay: found -0.1, expected zero or more"),
        ("fedavg", {"clip_norm": 0}, "algorithm.clip_norm: found 0.0, expected a positive number"),
        ("fedavg", {"warmup_rounds": -1}, "algorithm.warmup_rounds: found -1, expected zero or more"),
        ("fedavg", {"lr": "fast"}, "algorithm.lr: found 'fast', expected a number"),
        ("localadam", {"betas": [0.9, 1.0]}, r"algorithm.betas: beta2 is 1.0, expected a number in \[0, 1\)"),
        ("fedadam", {"betas": [-0.1, 0.9]}, r"algorithm.betas: beta1 is -0.1, expected a number in \[0, 1\)"),
        ("fadamgc", {"betas": [0.9]}, "algorithm.betas: found .*expected a list of 2 numbers"),
        ("fadamgc", {"eps": -1e-8}, "algorithm.eps: found -1e-08, expected zero or more"),
        ("fadamgc", {"local": "sgd"}, "algorithm.local: found 'sgd', expected one of: adam, rmsprop, adamw"),
        ("fadamgc_b", {"tracking_init": "none"}, "algorithm.tracking_init: found 'none', expected one of"),
        ("fedams", {"floor": 0}, "algorithm.floor: found 0.0, expected a positive number"),
        ("fedams", {"option": 3}, "algorithm.option: found 3, expected one of: 1, 2"),
        ("fedadam", {"tau": 0}, "algorithm.tau: found 0.0, expected a positive number"),
        ("fedyogi", {"tau": 0}, "algorithm.tau: found 0.0, expected a positive number"),
        ("fedadagrad", {"tau": 0}, "algorithm.tau: found 0.0, expected a positive number"),
        ("fedadagrad", {"beta": 1}, r"algorithm.beta: found 1.0, expected a number in \[0, 1\)"),
        ("fedprox", {"mu": -1}, "algorithm.mu: found -1.0, expected zero or more"),
        ("qfedavg", {"q": -1}, "algorithm.q: found -1.0, expected zero or more"),
        ("feddyn", {"alpha": 0}, "algorithm.alpha: found 0.0, expected a positive number"),
        ("feddyn", {"weights": "size"}, "algorithm.weights: found size, expected uniform"),
        ("padamfed", {"gamma": 0}, "algorithm.gamma: found 0.0, expected a positive number"),
        ("padamfed", {"total_rounds": 0}, "algorithm.total_rounds: found 0, expected a positive number"),
        *(
            (name, {key: value}, rf"algorithm.{key}: found {value}, expected a number in \[0, 1\]")
            for name, key in (
                ("fedavgm", "beta"), ("scaffoldm", "beta"), ("padamfed", "beta"), ("fedcm", "alpha"),
                ("fedlada", "alpha"), ("fedadamw", "alpha"),
            )
            for value in (-0.1, 1.1)
        ),
    ],
)  # fmt: skip
def test_values_out_of_range_name_the_key(name: str, keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_algorithm(name, **keys)


def test_an_unknown_algorithm_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"algorithm.name: unknown algorithm 'scafold' \(did you mean 'scaffold'\?\)"):
        load_algorithm("scafold")


# Names and defaults


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("FedAdamW", "fedadamw"), ("LocalAdamW", "localadamw"), ("FAdamGC", "fadamgc"), ("SCAFFOLD", "scaffold"),
        ("FA-NT", "fa_nt"), ("FAdamGT", "fadamgc"), ("FedIT", "fedavg"), ("Local Adam", "localadam"),
        ("SCAFFOLD-M", "scaffoldm"), ("FAdamGC-B", "fadamgc_b"), ("FedIT+AdamGT", "fadamgc"), ("FedAvg-M", "fedavgm"),
        ("my.module:FedAvg", "my.module:FedAvg"), ("fednova", "fednova"),
    ],
)  # fmt: skip
def test_names_as_papers_write_them(written: str, name: str) -> None:
    assert canonical_name(written) == name
    if name in algorithm_names():
        assert type(load_algorithm(written)) is type(load_algorithm(name))


def test_no_two_algorithms_share_a_name_in_any_spelling() -> None:
    for name in algorithm_names():
        spellings = (name, *type(load_algorithm(name)).aliases)
        assert {canonical_name(each.replace("_", "-").upper()) for each in spellings} == {name}


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("fadamcg", " (did you mean 'fadamgc'?)"), ("Scafold", " (did you mean 'scaffold'?)"), ("fednova", ""),
        ("feddf", ""),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_no_unrelated_advice(written: str, advice: str) -> None:
    with pytest.raises(UserError) as error:
        load_algorithm(written)
    assert f"unknown algorithm '{written}'{advice}; known: fa_nt (fadamet, fedit_adamet), fadamgc (" in str(error.value)


def test_steps_of_sgd_are_longer_by_default_than_those_of_adam() -> None:
    rates = {name: load_algorithm(name).lr for name in algorithm_names()}
    assert {name for name, lr in rates.items() if lr == 0.1} == {
        "fedavg", "fedavgm", "scaffold", "scaffoldm", "fedcm", "fedadam", "fedams", "fedyogi", "fedadagrad", "fedprox",
        "feddyn", "moon", "qfedavg",
    }  # fmt: skip
    assert rates.pop("padamfed") is None
    assert set(rates.values()) == {0.1, 1e-3}


def test_averages_by_size_where_the_papers_average_so() -> None:
    by_size = {name for name in algorithm_names() if load_algorithm(name).weights == "size"}
    assert by_size == {"fedavg", "fedprox", "moon"}
