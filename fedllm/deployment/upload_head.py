"""Checks what a client says in an upload beside its vectors. Nothing in it is trusted."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch

from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.deployment.messages import Upload


def unknown_client(client: Any, count: int) -> str | None:
    """What is wrong with a client's number in a federation of `count`; None if nothing is."""
    if _whole(client, 0, count - 1):
        return None
    return f"client: found {_shown(client)}, expected 0 to {count - 1}, num_clients less one"


def head_fault(
    upload: Any, algorithm: Algorithm, info: RoundInfo, samples: Any, start: Callable[[], str]
) -> str | None:
    """Why an upload does not belong to round info.index or cannot be of an honest client; None if all fits.

    samples: the number that would weigh it. start: gives the digest of what the round's clients begin with.
    """
    if not isinstance(upload, Upload):
        return f"found {type(upload).__name__}, expected an Upload, as Client.finish gives it, or its bytes"
    if info.index >= info.total:
        return f"the {info.total} rounds of the run are over"
    if upload.round != info.index:
        return f"round: found {_shown(upload.round)}, expected {info.index}"
    if upload.start != "" and upload.start != (expected := start()):
        return f"start: found {_shown(upload.start)}, expected {_shown(expected)}: it began with another x"
    if not _whole(upload.steps, 1, info.local_steps):
        return f"steps: found {_shown(upload.steps)}, expected 1 to {info.local_steps}, the federation's"
    most = _most_rate(algorithm, info, upload.steps)
    if not isinstance(upload.rate_sum, int | float) or not 0 < upload.rate_sum <= most:
        return f"rate_sum: found {_shown(upload.rate_sum)}, expected a number above 0, at most {most:.3g}"
    if not isinstance(upload.tracked, bool):
        return f"tracked: found {_shown(upload.tracked)}, expected true or false"
    if algorithm.weights == "size" and not _whole(samples, 1, 2**53):
        return f"samples: found {_shown(samples)}, expected a whole number above 0"
    return None


def _most_rate(algorithm: Algorithm, info: RoundInfo, steps: int) -> float:
    """The largest possible rate_sum: `steps` times the round's highest learning rate, plus 0.1 % for rounding."""
    return 1.001 * steps * float(algorithm.rates(torch.tensor([info.local_steps]), info).max())


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: Any) -> str:
    """The value's repr, shortened for a log."""
    return reprlib.repr(value)
