"""Exact Hessian sub-blocks of small models in federated training, and how block-diagonal the partition finds them.

This is the evidence behind the partition (FedAdamW paper, figures 3, 7 and 8): coordinates may share one second moment
where the Hessian couples them to each other and to little else.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

import fedllm
from fedllm.algorithms.base import Algorithm
from fedllm.blocks import BlockPartition
from fedllm.characters import MODELS, CharacterProblem, encode
from fedllm.data import load_task
from fedllm.errors import UserError
from fedllm.files import replace_text
from fedllm.partition import get_partition
from fedllm.recipe import Data, Partition
from fedllm.rounds import round_info, run_round, sample, start

CLIENTS = Partition(scheme="dirichlet_classes", alpha=0.1, clients=20, min_size=8)
SAMPLED, LOCAL_STEPS = 5, 5
PROBE = 4  # windows of each client that the Hessian is taken of
_ROWS = 16  # rows of a Hessian computed at once; more of them cost memory and save no time
_CAPTION = (
    "Share of the Hessian's squared norm inside our blocks / inside random blocks of the same sizes = ratio. "
    "! marks where ours hold no more than random ones."
)

Progress = Callable[[str, int, int], None]


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

    @property
    def blocks(self) -> int:
        return len(torch.unique(self.owner))


@dataclass(frozen=True)
class Study:
    """The maps of one model, round by round. loss: {round: of the windows that the Hessians are of}."""

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


def block_of(blocks: BlockPartition, parameter: str) -> Tensor:
    """The block [n] of each coordinate of a parameter, int64."""
    owner = blocks.expand(torch.arange(blocks.num_blocks, dtype=torch.float64))
    return owner[blocks.slices[parameter]].long()


def load_streams(name: str) -> list[Tensor]:
    """The character stream of each of 20 clients, dealt Dirichlet 0.1 by class from a data set's name or file."""
    is_file = Path(name).is_file()
    task = load_task(Data(train=name) if is_file else Data(name=name))
    texts = list(zip(*task.train.texts, strict=True))
    return [encode([text for row in rows for text in texts[row]]) for rows in get_partition(CLIENTS, task)]


def checkpoints(rounds: int) -> tuple[int, ...]:
    """The rounds after which maps are drawn: none, a tenth of them, all."""
    return tuple(sorted({0, -(-rounds // 10), rounds}))


def study(kind: str, streams: Sequence[Tensor], alg: Algorithm, *, rounds: int, seed: int, progress: Progress) -> Study:
    """Trains a small model (`transformer` or `mlp`) over the clients' streams and takes its Hessians on the way."""
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
            maps.append(Map(role, name, done, owner[order], H[order][:, order], structure(H, owner)))
    return Study(kind, type(alg).__name__, wanted, losses, maps)


def _loss_of(problem: CharacterProblem, windows: Tensor, parameters: dict[str, Tensor], name: str, w: Tensor) -> Tensor:
    return problem.loss({**parameters, name: w}, windows)


def _train(
    problem: CharacterProblem, alg: Algorithm, rounds: int, seed: int, progress: Callable[[int], None]
) -> Iterator[tuple[int, Tensor]]:
    """(rounds done, global x) at each checkpoint."""
    sampled = min(SAMPLED, problem.num_clients)
    info = round_info(alg, problem, rounds=rounds, sampled=sampled, tracked=None, local_steps=LOCAL_STEPS)
    federation = start(alg, problem, info)
    wanted = checkpoints(rounds)
    yield 0, federation.x
    for t in range(rounds):
        clients, tracked = sample(seed, t, problem.num_clients, info.sampled, info.tracked)
        run_round(alg, problem, federation, info, clients, tracked)
        progress(t + 1)
        if t + 1 in wanted:
            yield t + 1, federation.x


def run(
    kinds: Sequence[str], data: str, alg: Algorithm, *, rounds: int, seed: int, out: Path, progress: Progress
) -> list[Study]:
    """Studies each kind of model, and writes `hessian.json` and `hessian_<model>.png` and `.svg` into `out`."""
    from fedllm.hessian_plots import draw
    from fedllm.look import save

    if rounds < 1:
        raise UserError(f"--rounds: found {rounds}, expected 1 or more")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, expected a folder")
    streams = load_streams(data)
    studies = [study(kind, streams, alg, rounds=rounds, seed=seed, progress=progress) for kind in kinds]
    out.mkdir(parents=True, exist_ok=True)
    for found in studies:
        figure = draw(found)
        for suffix in ("png", "svg"):
            save(figure, out / f"hessian_{found.model}.{suffix}")
    settings = {"data": data, "rounds": rounds, "seed": seed, "algorithm": type(alg).__name__, "lr": alg.lr}
    replace_text(out / "hessian.json", json.dumps(settings | _record(studies), indent=2) + "\n")
    return studies


def _record(studies: Sequence[Study]) -> dict[str, object]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fedllm": fedllm.__version__,
    }
    models = {
        found.model: {
            "loss": found.loss,
            "maps": [
                {"role": m.role, "parameter": m.parameter, "round": m.round, "coordinates": len(m.owner)}
                | {"blocks": m.blocks, **asdict(m.structure), "ratio": m.structure.ratio}
                for m in found.maps
            ],
        }
        for found in studies
    }
    return {"clients": asdict(CLIENTS), "versions": versions, "models": models}


def table(found: Study) -> Table:
    """For the terminal: of each weight its blocks, and inside, random and their ratio after each of the rounds."""
    shown = Table(title=f"{found.model} under {found.algorithm}", box=SIMPLE_HEAD, show_edge=False, caption=_CAPTION)
    for heading in ("weight", "blocks", *(f"round {t}" for t in found.rounds)):
        shown.add_column(heading, justify="left" if heading == "weight" else "right", no_wrap=True)
    for role in MODELS[found.model].weights:
        maps = [m for m in found.maps if m.role == role]
        cells = [f"{s.inside:.2f}/{s.random:.2f} = {s.ratio:.1f}{_verdict(s)}" for s in (m.structure for m in maps)]
        shown.add_row(role, f"{maps[0].blocks} in {len(maps[0].owner):,}", *cells)
    return shown


def _verdict(found: Structure) -> str:
    return "" if found.ratio > 1 else "!"
