"""Clients and servers small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedllm import QuadraticProblem, load_algorithm
from fedllm.aggregation.settings import MEAN, RobustSettings
from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import RoundInfo
from fedllm.blocks import BlockPartition
from fedllm.blocks.layout import whole
from fedllm.client import Client, model_info
from fedllm.federation.info import round_info
from fedllm.server import Server

DIM, K, ROUNDS = 4, 3, 5
SIZES, STEPS = [3, 1, 4, 1, 5], [3, 1, 2, 3, 2]


def line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batches(seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 3, generator=rng), torch.randn(8, 1, generator=rng)) for _ in range(K)]


def setup(name: str, **keys: Any) -> tuple[Algorithm, RoundInfo]:
    alg = load_algorithm(name, lr=0.01, **keys)
    return alg, model_info(alg, line(), rounds=ROUNDS, num_clients=10, sampled=2, local_steps=K)


def client_of(name: str, **keys: Any) -> Client:
    return Client(line(), *setup(name, **keys))


class Point(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())


def slope(model: Point, batch: tuple[QuadraticProblem, int, int, int]) -> Tensor:
    """A loss whose value and gradient are exactly the problem's, of a client in a round and step."""
    problem, client, round, step = batch
    loss, g = problem.loss_and_gradient(model.x.detach()[None], [client], round, step)
    linear = (g[0] * model.x).sum()
    return linear + (loss[0] - linear).detach()


BLOCKS = BlockPartition((whole("a", "tensor", 1), whole("b", "tensor", 3), whole("c", "tensor", 2)))


def quadratic() -> QuadraticProblem:
    base = QuadraticProblem.random(5, 6, seed=4, spread=2.0)
    x0 = torch.linspace(-1, 1, 6).double()
    return QuadraticProblem(base.H, base.a, x0=x0, noise=0.3, local_steps=STEPS, sizes=SIZES, blocks=BLOCKS)


Federation = tuple[Algorithm, RoundInfo, Server, list[Client]]


def quadratic_federation(alg: Algorithm, rounds: int, robust: RobustSettings = MEAN, **shared: Any) -> Federation:
    """A server and the clients of `quadratic`. robust: the server's; shared: settings that all of them have."""
    problem = quadratic()
    number = problem.num_clients
    info = round_info(alg, problem, rounds=rounds, sampled=number, tracked=None, local_steps=K)
    server = Server(alg, problem.initial(), info, robust=robust, **shared)
    return alg, info, server, [Client(Point(problem.initial()), alg, info, number=c, **shared) for c in range(number)]


def quadratic_batches(client: int, round: int) -> list[Any]:
    """What `slope` reads in the steps of a client of `quadratic`."""
    return [(quadratic(), client, round, k) for k in range(STEPS[client])]
