"""`fedllm run` with faults: FEDLLM_TEST_FAULT is a list of rank:round:how, how one of kill (SIGKILL), raise and nan."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.cli import main
from fedllm.lora_problem import LoraProblem

FAULTS = [fault.split(":") for fault in os.environ["FEDLLM_TEST_FAULT"].split()]
plain = LoraProblem.loss_and_gradient


def faulty(self: LoraProblem, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
    loss, G = plain(self, X, clients, round, step)
    for rank, when, how in FAULTS:
        if os.environ["RANK"] != rank or round + 1 != int(when):
            continue
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("a fault of the test's own making")
        G[0] = torch.nan
    return loss, G


if __name__ == "__main__":
    LoraProblem.loss_and_gradient = faulty  # type: ignore[method-assign]
    sys.exit(main(["run", *sys.argv[1:]]))
