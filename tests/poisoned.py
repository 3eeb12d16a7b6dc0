"""`fedllm run` of a process whose clients can be poisoned: FEDLLM_TEST_FAULT="rank:round:how" for tests of several
processes, how one of kill (SIGKILL), raise, hang and nan."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.cli import main
from fedllm.lora_problem import LoraProblem

RANK, ROUND, HOW = os.environ["FEDLLM_TEST_FAULT"].split(":")
plain = LoraProblem.loss_and_gradient


def faulty(self: LoraProblem, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
    loss, G = plain(self, X, clients, round, step)
    if os.environ["RANK"] == RANK and round + 1 == int(ROUND):
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "hang":
            time.sleep(1000)
        if HOW == "raise":
            raise ValueError("a fault of the test's own making")
        G[0] = torch.nan
    return loss, G


if __name__ == "__main__":
    LoraProblem.loss_and_gradient = faulty  # type: ignore[method-assign]
    sys.exit(main(["run", *sys.argv[1:]]))
