"""Exact Hessians of single weights of small federated models, and how block-diagonal they are under the partition.

The FedAdamW paper (figures 3, 7 and 8) justifies the partition with them. Coordinates can share one second moment if
the Hessian's large entries couple them with each other and not with coordinates of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm
from fedllm.blocks import BlockPartition
from fedllm.common.console import ProgressCallback
from fedllm.data.loading import load_dataset
from fedllm.data.partition_file import get_partition
from fedllm.data.settings import DataSettings, PartitionSettings
from fedllm.federation.info import round_info
from fedllm.federation.rounds import run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.studies.character_models import CharacterProblem, encode

CLIENTS = PartitionSettings(scheme="dirichlet_classes", alpha=0.1, clients=20, min_size=8)
SAMPLED, LOCAL_STEPS = 5, 5
PROBE = 4  # windows per client in the loss whose Hessian is computed
_ROWS = 16  # rows of a Hessian computed at once; more need more memory and are not faster


@dataclass(frozen=True)
class Structure:
    """How block-diagonal a Hessian H [n, n] is under a partition of its n coordinates.

    inside: the share of its squared Frobenius norm that lies within blocks, sum over i, j of one block of H_ij^2 /
        sum over all of H_ij^2. So 1 - inside is the squared relative error of the block-diagonal approximation.
    random: what `inside` is on average over all partitions with blocks of these sizes. It is exact: H_ii^2 always
        counts, and H_ij^2 of i != j with probability sum_b n_b (n_b - 1) / (n (n - 1)).
    """

    inside: float
    random: float

    @property
    def ratio(self) -> float:
        """inside / random: above 1 where the partition follows the Hessian better than chance."""
        return self.inside / self.random


@dataclass(frozen=True)
class Magnitude:
    """How large a Hessian H [n, n] is.

    mean_entry: the mean |H_ij| over all entries. largest_entry: the largest |H_ij|. frobenius: the root of the sum of
    H_ij^2. eigenvalue: the largest |eigenvalue|.
    """

    mean_entry: float
    largest_entry: float
    frobenius: float
    eigenvalue: float


@dataclass(frozen=True)
class Map:
    """The Hessian of one weight after `round` rounds, its coordinates in the order of their blocks.

    owner [n]: the block of each coordinate. H [n, n].
    """

    role: str
    parameter: str
    round: int
    owner: Tensor
    H: Tensor
    structure: Structure
    magnitude: Magnitude

    @property
    def blocks(self) -> int:
        return len(torch.unique(self.owner))


@dataclass(frozen=True)
class Study:
    """The maps of one model after each of `rounds`. loss: {round: loss on the windows used for the Hessians}."""

    model: str
    algorithm: str
    rounds: tuple[int, ...]
    loss: dict[int, float]
    maps: list[Map]


def hessian(loss: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """The exact Hessian [n, n] of a scalar loss at w (n coordinates in any shape), by differentiating its gradient."""
    w = w.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(w), w, create_graph=True)
    n, rows = w.numel(), []
    if not gradient.requires_grad:
        return w.new_zeros(n, n)
    for directions in torch.split(torch.eye(n, dtype=w.dtype).view(n, *w.shape), _ROWS):
        (products,) = torch.autograd.grad(
            gradient, w, directions, is_grads_batched=True, retain_graph=True, materialize_grads=True
        )
        rows.append(products.reshape(-1, n))
    return torch.cat(rows)


def structure(H: Tensor, owner: Tensor) -> Structure:
    """How block-diagonal H [n, n] is under the blocks owner [n]. Raises ValueError for a Hessian of zeros."""
    mass = H.double().square()
    total, diagonal = float(mass.sum()), float(mass.diagonal().sum())
    if total == 0:
        raise ValueError("structure: the Hessian is zero everywhere; it has no structure to measure")
    inside = float(mass[owner[:, None] == owner].sum())
    n, sizes = len(owner), torch.unique(owner, return_counts=True)[1]
    together = float((sizes * (sizes - 1)).sum()) / (n * (n - 1))
    return Structure(inside / total, (diagonal + together * (total - diagonal)) / total)


def magnitude(H: Tensor) -> Magnitude:
    """How large a symmetric H [n, n] is."""
    H = H.double()
    entries, eigenvalues = H.abs(), torch.linalg.eigvalsh((H + H.mT) / 2)
    return Magnitude(
        float(entries.mean()),
        float(entries.max()),
        float(torch.linalg.matrix_norm(H)),
        float(eigenvalues.abs().max()),
    )


def block_of(blocks: BlockPartition, parameter: str) -> Tensor:
    """The block [n] of each coordinate of a parameter, int64."""
    owner = blocks.expand(torch.arange(blocks.num_blocks, dtype=torch.float64))
    return owner[blocks.slices[parameter]].long()


def load_streams(name: str) -> list[Tensor]:
    """The character streams of 20 clients. `name`: a data set or a file, split by class with Dirichlet alpha 0.1."""
    is_file = Path(name).is_file()
    dataset = load_dataset(DataSettings(train=name) if is_file else DataSettings(name=name))
    texts = list(zip(*dataset.train.texts, strict=True))
    return [encode([text for row in rows for text in texts[row]]) for rows in get_partition(CLIENTS, dataset)]


def checkpoints(rounds: int) -> tuple[int, ...]:
    """The numbers of rounds after which Hessians are computed: 0, a tenth, a half (both rounded up), all."""
    return tuple(sorted({0, -(-rounds // 10), -(-rounds // 2), rounds}))


def study(
    kind: str, streams: Sequence[Tensor], alg: Algorithm, *, rounds: int, seed: int, progress: ProgressCallback
) -> Study:
    """Trains a small model (`transformer` or `mlp`) on the clients' streams; computes its Hessians at checkpoints."""
    problem = CharacterProblem(kind, streams, seed=seed)
    windows = problem.probe(PROBE)
    losses: dict[int, float] = {}
    maps: list[Map] = []
    wanted = checkpoints(rounds)
    for done, x in _train(problem, alg, rounds, seed, lambda t: progress(f"{kind}: rounds", t, rounds)):
        parameters = {name: value[0] for name, value in problem.space.views(x[None]).items()}
        losses[done] = float(problem.loss(parameters, windows))
        for role, name in problem.model.weights.items():
            progress(f"{kind}: Hessians", len(maps), len(problem.model.weights) * len(wanted))
            w, owner = parameters[name], block_of(problem.blocks, name)
            H = hessian(partial(_loss_of, problem, windows, parameters, name), w)
            order = owner.argsort(stable=True)
            found = (structure(H, owner), magnitude(H))
            maps.append(Map(role, name, done, owner[order], H[order][:, order], *found))
    return Study(kind, type(alg).__name__, wanted, losses, maps)


def _loss_of(problem: CharacterProblem, windows: Tensor, parameters: dict[str, Tensor], name: str, w: Tensor) -> Tensor:
    return problem.loss({**parameters, name: w}, windows)


def _train(
    problem: CharacterProblem, alg: Algorithm, rounds: int, seed: int, progress: Callable[[int], None]
) -> Iterator[tuple[int, Tensor]]:
    """Trains, and yields (rounds done, global x) at each checkpoint."""
    sampled = min(SAMPLED, problem.num_clients)
    info = round_info(alg, problem, rounds=rounds, sampled=sampled, tracked=None, local_steps=LOCAL_STEPS)
    setup = Setup(alg, problem, info)
    federation = start(setup)
    wanted = checkpoints(rounds)
    yield 0, federation.x
    for t in range(rounds):
        clients, tracked = sample(seed, t, problem.num_clients, info.sampled, info.tracked)
        run_round(setup, federation, clients, tracked)
        progress(t + 1)
        if t + 1 in wanted:
            yield t + 1, federation.x
