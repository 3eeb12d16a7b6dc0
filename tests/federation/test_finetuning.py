"""Local steps of copies of the model at clients, for evaluations alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm
from fedllm.algorithms import algorithm_names
from fedllm.blocks import BlockPartition
from fedllm.federation.finetuning import finetune
from fedllm.federation.info import round_info
from fedllm.federation.local_training import train_together
from fedllm.federation.rounds import run_round, start
from fedllm.federation.setup import Setup

CLIENTS, DIM, STEPS = 3, 5, 4


def setup_of(name: str, **settings: Any) -> Setup:
    rng = torch.Generator().manual_seed(1)
    problem = QuadraticProblem.random(CLIENTS, DIM, noise=0.1)
    problem._x0 = torch.randn(DIM, generator=rng, dtype=torch.float64)
    problem.blocks = BlockPartition.elementwise(DIM)
    algorithm = load_algorithm(name, **{"lr": 0.05, **settings})
    info = round_info(algorithm, problem, rounds=6, sampled=CLIENTS, tracked=None, local_steps=STEPS)
    return Setup(algorithm, problem, info)


def rows(setup: Setup) -> Tensor:
    return setup.problem.initial().repeat(CLIENTS, 1)


@pytest.mark.parametrize("name", algorithm_names())
def test_the_steps_are_those_of_the_algorithms_first_round(name: str) -> None:
    """Also in a later round of the run, whose server and clients have vectors by then, with the draws of that round."""
    setup = setup_of(name)
    state = start(setup)
    everyone = list(range(CLIENTS))
    trained = train_together(setup.at(0), state, everyone, [STEPS] * CLIENTS, set(everyone), lambda done: None)
    given, clients = rows(setup), list(range(CLIENTS))
    found = finetune(setup, given, clients, 0, STEPS)
    assert torch.equal(found, trained.local["x"])
    assert torch.equal(given, rows(setup)), "what is given does not change"
    assert not torch.equal(found, given)
    for _ in range(2):
        run_round(setup, state, clients, clients)
    assert torch.equal(finetune(setup, given, clients, 0, STEPS), found)
    assert not torch.equal(finetune(setup, given, clients, 1, STEPS), found), "the noise is that of the round"


def test_a_client_does_not_depend_on_the_others_and_the_rate_on_no_schedule() -> None:
    plain, scheduled = setup_of("scaffold"), setup_of("scaffold", schedule="linear", warmup_rounds=3)
    everyone = finetune(plain, rows(plain), [0, 1, 2], 5, STEPS)
    assert torch.equal(finetune(plain, rows(plain)[:1], [2], 5, STEPS)[0], everyone[2])
    assert torch.equal(finetune(scheduled, rows(plain), [0, 1, 2], 5, STEPS), everyone)


def test_fedavg_descends_on_the_clients_own_objective() -> None:
    setup = setup_of("fedavg")
    problem = setup.problem
    assert isinstance(problem, QuadraticProblem)
    problem.noise = 0.0
    found = finetune(setup, rows(setup), [0, 1, 2], 0, STEPS)
    for client in range(CLIENTS):
        shrink = torch.linalg.matrix_power(torch.eye(DIM, dtype=torch.float64) - 0.05 * problem.H[client], STEPS)
        expected = problem.a[client] + shrink @ (problem.initial() - problem.a[client])
        torch.testing.assert_close(found[client], expected)
