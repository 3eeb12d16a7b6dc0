"""`fedllm run` with faults: FEDLLM_TEST_FAULT is a list of rank:round:how.

how: kill (SIGKILL), kill-once (unless the launcher has started the processes again), sleep (8 seconds), raise, nan;
other-data (one label of the training split is another); full: from that round on more than two clients together do not
fit into the process's memory, nor more than ten samples of an evaluation.

Prints rank, round and number of clients whenever some begin to train together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedllm.cli.commands import main
from fedllm.data.loading import Dataset
from fedllm.distributed.process_group import restarted
from fedllm.experiment import parties
from fedllm.experiment.recipe_data import read_data
from fedllm.problems.lora.packing import Packed
from fedllm.problems.lora.problem import LoraProblem
from fedllm.problems.lora.stacked_model import StackedModel

FAULTS = [fault.split(":") for fault in os.environ["FEDLLM_TEST_FAULT"].split()]
plain = LoraProblem.loss_and_gradient
whole_pass, whole_run = StackedModel.packed, StackedModel._run


def full(self: StackedModel, X: Tensor, packed: Packed, keys: Tensor | None = None) -> Tensor:
    """The forward pass, in which torch asks for more memory than any machine grants."""
    logits = whole_pass(self, X, packed, keys)
    torch.empty(2**46, dtype=torch.float64)
    return logits


def crowded_run(self: StackedModel, wanted: Any, inputs: dict[str, Tensor] | None = None) -> Tensor:
    if inputs is not None and not torch.is_grad_enabled() and len(inputs["input_ids"]) > 10:
        torch.empty(2**46, dtype=torch.float64)
    return whole_run(self, wanted, inputs)


def faulty(self: LoraProblem, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
    rank = os.environ["RANK"]
    if step == 0:
        print(f"rank {rank}, round {round + 1}: {len(clients)} clients", flush=True)
    crowded = any(on == rank and round + 1 >= int(when) and how == "full" for on, when, how in FAULTS)
    StackedModel.packed = full if crowded and len(clients) > 2 else whole_pass  # type: ignore[method-assign]
    StackedModel._run = crowded_run if crowded else whole_run  # type: ignore[method-assign]
    loss, G = plain(self, X, clients, round, step)
    for on, when, how in FAULTS:
        if on != rank or round + 1 != int(when):
            continue
        if how == "sleep":
            time.sleep(8)
        if how == "kill" or (how == "kill-once" and not restarted()):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("a fault of the test's own making")
        if how == "nan":
            G[0] = torch.nan
    return loss, G


def read_otherwise(*arguments: Any) -> Dataset:
    found = read_data(*arguments)
    labels = found.train.labels.copy()
    labels[0] = 1 - labels[0]
    train = replace(found.train, labels=labels)
    return replace(found, train=train, fingerprint=train.fingerprint())


if __name__ == "__main__":
    if any(on == os.environ["RANK"] and how == "other-data" for on, _, how in FAULTS):
        parties.read_data = read_otherwise  # type: ignore[attr-defined]
    LoraProblem.loss_and_gradient = faulty  # type: ignore[method-assign]
    sys.exit(main(["run", *sys.argv[1:]]))
