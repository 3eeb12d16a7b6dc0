"""Every algorithm and every option of it against the plain reference, to 1e-10, in the hardest federation."""

from __future__ import annotations

import random

import pytest
import torch
from reference import ALGORITHMS, Script

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.algorithms import algorithm_names
from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import whole

N, DIM, ROUNDS, K = 7, 6, 5, 3
STEPS = [3, 1, 2, 3, 3, 2, 1]
SAMPLES = [5, 1, 4, 2, 8, 3, 3]
SIZES = [1, 3, 2]
BLOCKS = BlockPartition(tuple(whole(f"block {b}", "tensor", size) for b, size in enumerate(SIZES)))

COMMON = {
    "plain": {},
    "server_lr": {"server_lr": 0.7, "weight_decay": 0.05},
    "cosine_steps": {"schedule": "cosine_steps", "server_lr": 1.3},
    "cosine_rounds": {"schedule": "cosine_rounds", "warmup_rounds": 2, "weights": "size"},
    "linear, clipped": {"schedule": "linear", "clip_norm": 1.5, "server_lr": 0.5},
}
OPTIONS = {
    "fedavg": [{}],
    "fedavgm": [{}, {"beta": 0.4}, {"beta": 1.0}],
    "scaffold": [{}],
    "scaffoldm": [{}, {"beta": 0.4}, {"beta": 1.0}],
    "fedcm": [{}, {"alpha": 0.4}],
    "fedprox": [{"weights": "size"}, {"mu": 0.4}],
    "moon": [{"weights": "size"}, {"mu": 5.0}, {"mu": 0.4, "temperature": 0.1}, {"mu": 0}],
    # FedDyn has uniform weights alone
    "feddyn": [{"weights": "uniform"}, {"weights": "uniform", "alpha": 0.7}],
    "qfedavg": [{}, {"q": 0.2}, {"q": 2.0}, {"q": 0}],
    "fedyogi": [{}, {"betas": [0.5, 0.8], "tau": 0.1}, {"betas": [0, 0]}],
    "fedadagrad": [{}, {"beta": 0.5, "tau": 0.1}],
    "fedadam": [{}, {"betas": [0.5, 0.8], "tau": 0.1}, {"bias_correction": True}, {"betas": [0, 0]}],
    "fedams": [
        {},
        {"option": 1},
        {"floor": 1e-6, "eps": 1e-5, "option": 1},
        {"floor": 1e-6, "eps": 1e-5, "betas": [0.5, 0.8]},
    ],
    "localadam": [
        {},
        {"second_moment": "reset"},
        {"betas": [0.5, 0], "eps": 1e-3},
        {"amsgrad": False},
        {"decay": "coupled"},
        {"second_moment": "reset", "bias_correction": "local"},
        {"second_moment": "reset", "bias_correction": "local", "amsgrad": False, "decay": "coupled"},
    ],
    "localadamw": [{}, *({"aggregate": name} for name in ("none", "m", "v", "vm", "mean_v"))],
    "fedlada": [{}, {"alpha": 0.9, "betas": [0.5, 0.8], "eps": 0.1}],
    "padamfed": [
        {"lr": None},
        {"lr": None, "total_rounds": 200},
        {"lr": None, "beta": 0.3, "gamma": 0.2},
        {"lr": 0.02, "gamma": 0.3},
    ],
    "fa_nt": [{}, {"betas": [0.5, 0], "eps": 1e-3}],
    "fadamgc": [
        {"local": local, "tracking_init": init, "betas": betas}
        for local in ("adam", "rmsprop", "adamw")
        for init in ("zero", "gradient")
        for betas in ([0.9, 0.99], [0.5, 0])
    ],
    "fadamgc_b": [{}, {"tracking_init": "gradient"}, {"betas": [0.5, 0]}],
    "fedadamw": [
        {},
        {"form": "alg3"},
        {"form": "alg3", "alpha": 0.9},
        {"bias_time": "global"},
        {"decay": "coupled"},
        {"alpha": 0},
        {"aggregate_v": False},
        {"aggregate_v": False, "alpha": 0, "bias_time": "global"},
        {"betas": [0.5, 0], "eps": 1e-3},
    ],
}
CASES = [
    pytest.param(name, keys, id=f"{name}-{label}-{number}")
    for name, options in OPTIONS.items()
    for number, option in enumerate(options)
    for label, common in COMMON.items()
    for keys in [{"lr": 0.05, "weights": "uniform", **common, **option}]
]


def hard_problem() -> QuadraticProblem:
    """Noise, blocks of unequal size, clients with unequal numbers of steps and of samples."""
    base = QuadraticProblem.random(N, DIM, seed=3, spread=2.0)
    x0 = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    return QuadraticProblem(
        base.H, base.a, x0=x0, noise=0.3, seed=5, local_steps=STEPS, sizes=SAMPLES, blocks=BLOCKS
    )  # fmt: skip


def partial_participation() -> list[tuple[list[int], list[int]]]:
    """S = 4 of the 7 clients a round, T = 2 of them tracked."""
    rng = random.Random(1)
    sampled = [rng.sample(range(N), 4) for _ in range(ROUNDS)]
    return [(clients, rng.sample(clients, 2)) for clients in sampled]


def test_every_algorithm_has_a_reference() -> None:
    assert set(ALGORITHMS) == set(OPTIONS) == set(algorithm_names())


@pytest.mark.parametrize(("name", "keys"), CASES)
def test_equals_the_reference(name: str, keys: dict) -> None:
    problem, who = hard_problem(), partial_participation()
    result = simulate(
        load_algorithm(name, **keys), problem, rounds=ROUNDS, local_steps=K, clients_per_round=4,
        tracked_per_round=2, schedule=who, cohort=3,
    )  # fmt: skip
    given = {key: value for key, value in keys.items() if value is not None}
    run = Script(problem, who, K=K, steps=STEPS, samples=SAMPLES, sizes=SIZES, given=given)
    ALGORITHMS[name](run)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    check(result.history, torch.stack(run.history))
    assert set(result.server) == set(run.server)
    for key, value in run.server.items():
        check(result.server[key], value)
    assert set(result.clients) == set(run.clients)
    for key, rows in run.clients.items():
        check(result.clients[key], torch.stack([rows[i] for i in range(N)]))


def test_elementwise_blocks_ignore_the_partition() -> None:
    problem, who = hard_problem(), partial_participation()
    for name in ("fedadamw", "fadamgc_b"):
        alg = load_algorithm(name, lr=0.05, blocks="elementwise")
        result = simulate(alg, problem, rounds=ROUNDS, local_steps=K, clients_per_round=4, schedule=who)
        run = Script(problem, who, K=K, steps=STEPS, given={"lr": 0.05})
        ALGORITHMS[name](run)
        torch.testing.assert_close(result.x, run.history[-1], rtol=1e-10, atol=1e-10)
