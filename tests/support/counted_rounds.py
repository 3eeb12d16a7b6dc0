"""Counts the rounds that a command runs, and may interrupt it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fedllm.experiment.training


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[int]:
    """The rounds that are run from now on; the user presses Ctrl-C in the `stop_at`-th."""
    rounds: list[int] = []
    run_round: Callable[..., Any] = fedllm.experiment.training.run_round

    def counting(*arguments: Any) -> Any:
        if len(rounds) + 1 == stop_at:
            raise KeyboardInterrupt
        rounds.append(1)
        return run_round(*arguments)

    monkeypatch.setattr(fedllm.experiment.training, "run_round", counting)
    return rounds
