"""How long the steps of FedAdamW or FedLADA are after a run's last checkpoint: the clients' gradients beside v.

python -m benchmarks.checks.step_length runs/qnli-s0 runs/qnli-s1

Adam's step has the length of its rate where a gradient is as large as the root of the second moment, and a shorter one
where the gradient is smaller. Both methods begin a round with the server's second moment: FedAdamW with vbar, corrected
as in FW Alg. 2, line 12, FedLADA with v, which never falls. For each run: the mean loss of one batch of every client
at x, and for each block the root mean square of these batches' gradients divided by the root of the block's mean second
moment. Given are the quartiles over the blocks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedllm import load_recipe
from fedllm.algorithms.base import Algorithm
from fedllm.algorithms.fedadamw import FedAdamW
from fedllm.algorithms.fedlada import FedLADA
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.experiment.build import ReadCache, assemble
from fedllm.experiment.trained import snapshot_of
from fedllm.results.reader import require_run_folder


@dataclass(frozen=True)
class StepLength:
    """After `round` rounds: the mean loss of one batch of every client, and the ratio of each block whose second moment
    is not 0, [at most B]."""

    round: int
    loss: float
    ratios: Tensor

    def __str__(self) -> str:
        low, median, high = torch.quantile(self.ratios, torch.tensor([0.25, 0.5, 0.75])).tolist()
        return (
            f"after round {self.round}, loss {self.loss:.3f}; gradient / sqrt(v) of {len(self.ratios)} blocks: "
            f"median {median:.3g}, quartiles {low:.3g} and {high:.3g}"
        )


def second_moment(algorithm: Algorithm, server: State, steps: int, blocks: BlockPartition) -> Tensor:
    """The mean second moment of each block [B] with which the next round begins. steps: made so far, by one client."""
    if isinstance(algorithm, FedAdamW):
        return server["vbar"] / (1 - algorithm.betas[1] ** steps)
    return blocks.means(server["v"])


def step_length(folder: Path, cache: ReadCache) -> StepLength:
    """Raises UserError if the folder is not one of a run of these methods, or has no checkpoint."""
    require_run_folder(folder)
    recipe = load_recipe(folder / "recipe.yaml")
    algorithm = recipe.load_algorithm()
    if not (isinstance(algorithm, FedLADA) or (isinstance(algorithm, FedAdamW) and algorithm.aggregate_v)):
        raise UserError(
            f"{folder}: {recipe.algorithm['name']} keeps no second moment on the server; expected fedadamw with "
            f"aggregate_v: true, or fedlada"
        )
    snapshot = snapshot_of(folder)
    job = assemble(recipe, cache)
    problem, blocks = job.problem, job.info.blocks.to("cpu")
    x, squares, losses = snapshot.x[None].to(job.machine.device), torch.zeros(problem.dim), []
    for client in range(problem.num_clients):
        loss, gradient = problem.loss_and_gradient(x, [client], snapshot.round, 0)
        squares += gradient[0].cpu() ** 2 / problem.num_clients
        losses.append(loss.item())
    v = second_moment(algorithm, snapshot.server, snapshot.round * job.info.local_steps, blocks)
    ratios = (blocks.means(squares) / v)[v > 0].sqrt()
    return StepLength(snapshot.round, sum(losses) / len(losses), ratios)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="RUN", type=Path)
    cache = ReadCache()
    try:
        for folder in parser.parse_args(arguments).folders:
            print(f"{folder.name}: {step_length(folder, cache)}", flush=True)
    except UserError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
