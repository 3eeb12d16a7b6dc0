"""`fedllm run` with SIGUSR1 in a round: FEDLLM_TEST_FAULT is ranks:round, for example 01:2."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from fedllm.cli.commands import main
from fedllm.problems.lora.problem import LoraProblem

RANKS, ROUND = os.environ["FEDLLM_TEST_FAULT"].split(":")
plain = LoraProblem.loss_and_gradient


def signalled(self: LoraProblem, X: Any, clients: Any, round: int, step: int) -> Any:
    if (round + 1, step) == (int(ROUND), 0) and os.environ["RANK"] in RANKS:
        os.kill(os.getpid(), signal.SIGUSR1)
    return plain(self, X, clients, round, step)


if __name__ == "__main__":
    LoraProblem.loss_and_gradient = signalled  # type: ignore[method-assign]
    sys.exit(main(["run", *sys.argv[1:]]))
