"""How long the steps of FedAdamW are after its last checkpoint: the clients' gradients beside the averaged vbar.

python -m benchmarks.checks.step_length runs/qnli-s0 runs/qnli-s1

Adam's step has the length of its rate where a gradient is as large as the root of the second moment, and a shorter one
where the gradient is smaller. For each run: the mean loss of one batch of every client at x, and for each block the
root mean square of these batches' gradients divided by the root of vbar, corrected as in FW Alg. 2, line 12. Given are
the quartiles over the blocks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedllm import load_recipe
from fedllm.algorithms.fedadamw import FedAdamW
from fedllm.common.console import warn
from fedllm.common.errors import UserError
from fedllm.experiment.build import ReadCache, assemble
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.results.reader import require_run_folder


@dataclass(frozen=True)
class StepLength:
    """After `round` rounds: the mean loss of one batch of every client, and the ratio of each block whose
    vbar is not 0, [at most B]."""

    round: int
    loss: float
    ratios: Tensor

    def __str__(self) -> str:
        low, median, high = torch.quantile(self.ratios, torch.tensor([0.25, 0.5, 0.75])).tolist()
        return (
            f"after round {self.round}, loss {self.loss:.3f}; gradient / sqrt(vbar) of {len(self.ratios)} blocks: "
            f"median {median:.3g}, quartiles {low:.3g} and {high:.3g}"
        )


def step_length(folder: Path, cache: ReadCache) -> StepLength:
    """Raises UserError if the folder is not one of a run with a vbar, or has no checkpoint."""
    require_run_folder(folder)
    recipe = load_recipe(folder / "recipe.yaml")
    algorithm = recipe.load_algorithm()
    if not (isinstance(algorithm, FedAdamW) and algorithm.aggregate_v):
        raise UserError(f"{folder}: {recipe.algorithm['name']} keeps no vbar; expected fedadamw with aggregate_v: true")
    snapshot = Checkpoints(folder / "checkpoints", warn).latest()
    if snapshot is None:
        raise UserError(f"{folder}: no intact checkpoint in {folder / 'checkpoints'}; run the recipe again")
    job = assemble(recipe, cache)
    problem, blocks = job.problem, job.info.blocks
    squares, losses = torch.zeros(problem.dim), []
    for client in range(problem.num_clients):
        loss, gradient = problem.loss_and_gradient(snapshot.x[None], [client], snapshot.round, 0)
        squares += gradient[0] ** 2 / problem.num_clients
        losses.append(loss.item())
    steps = snapshot.round * job.info.local_steps
    vh = snapshot.server["vbar"] / (1 - algorithm.betas[1] ** steps)
    ratios = (blocks.means(squares) / vh)[vh > 0].sqrt()
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
