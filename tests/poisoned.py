"""`fedllm run` with faults: FEDLLM_TEST_FAULT is a list of rank:round:how, how one of kill (SIGKILL), raise and nan; or
full, with which from that round on more than two clients at once do not fit into the process's memory, nor more than
ten samples of an evaluation.

Prints rank, round and cohort size of every cohort that begins.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedllm.cli import main
from fedllm.cohort import CohortModel
from fedllm.lora_problem import LoraProblem
from fedllm.packing import Packed

FAULTS = [fault.split(":") for fault in os.environ["FEDLLM_TEST_FAULT"].split()]
plain = LoraProblem.loss_and_gradient
whole_pass, whole_run = CohortModel.packed, CohortModel._run


def full(self: CohortModel, X: Tensor, packed: Packed, keys: Tensor | None = None) -> Tensor:
    """The forward pass, in which torch asks for more memory than any machine grants."""
    logits = whole_pass(self, X, packed, keys)
    torch.empty(2**46, dtype=torch.float64)
    return logits


def crowded_run(self: CohortModel, wanted: Any, inputs: dict[str, Tensor]) -> Tensor:
    if not torch.is_grad_enabled() and len(inputs["input_ids"]) > 10:
        torch.empty(2**46, dtype=torch.float64)
    return whole_run(self, wanted, inputs)


def faulty(self: LoraProblem, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
    rank = os.environ["RANK"]
    if step == 0:
        print(f"rank {rank}, round {round + 1}: {len(clients)} clients", flush=True)
    crowded = any(on == rank and round + 1 >= int(when) and how == "full" for on, when, how in FAULTS)
    CohortModel.packed = full if crowded and len(clients) > 2 else whole_pass  # type: ignore[method-assign]
    CohortModel._run = crowded_run if crowded else whole_run  # type: ignore[method-assign]
    loss, G = plain(self, X, clients, round, step)
    for on, when, how in FAULTS:
        if on != rank or round + 1 != int(when):
            continue
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("a fault of the test's own making")
        if how == "nan":
            G[0] = torch.nan
    return loss, G


if __name__ == "__main__":
    LoraProblem.loss_and_gradient = faulty  # type: ignore[method-assign]
    sys.exit(main(["run", *sys.argv[1:]]))
