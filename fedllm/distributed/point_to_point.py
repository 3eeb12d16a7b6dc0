"""Plain data between two processes of the group, as JSON in byte tensors, never pickled; and who is lost.

Every call that another process must answer says whom it waits for, so that a lost process is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedllm.common.errors import RunError
from fedllm.distributed.process_group import StoppedError, abandon_group

Doing = Callable[[int], str]
_LATE = "imed out"  # in gloo's words for a process that did not answer in time


def send(value: Any, to: int) -> int:
    """Sends plain data to a process; the number of bytes."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), to)
    dist.send(data, to)
    return len(data)


def receive(source: int) -> tuple[Any, int]:
    """The plain data that a process sent, and the number of their bytes."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source)
    return json.loads(data.numpy().tobytes()), len(data)


def receive_all(ranks: Sequence[int], doing: Doing, timeout: float) -> dict[int, tuple[Any, int]]:
    """What each of these processes sent, and the bytes of it.

    The first that is lost is told at once, though others are still at work: a thread waits for each. The calling thread
    stays open to signals. Raises StoppedError or RunError, see `lost`.
    """
    found: dict[int, tuple[Any, int]] = {}
    answers = _wait_for(ranks)
    while len(found) < len(ranks):
        rank, answer = answers.get()
        if isinstance(answer, Exception):
            raise lost(rank, doing, answer, timeout)
        found[rank] = answer
    return found


def who_is_lost(ranks: Sequence[int], doing: Doing, timeout: float, seconds: float = 1.0) -> RunError | None:
    """The error that names a lost process, if one of these shows itself lost within so many seconds."""
    answers = _wait_for(ranks)
    for _ in ranks:
        try:
            rank, answer = answers.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(answer, Exception):
            return lost(rank, doing, answer, timeout)
    return None


def lost(rank: int, doing: Doing, error: Exception, timeout: float) -> RunError:
    """The error that says that a process did not answer: because it ended, or within `timeout` seconds."""
    abandon_group()
    if _LATE in str(error):
        return RunError(f"no answer for {timeout:g} s (run.timeout): process {rank} was {doing(rank)}")
    return StoppedError(f"process {rank} ended without a word (killed, or out of memory?) while {doing(rank)}")


def _wait_for(ranks: Sequence[int]) -> SimpleQueue[tuple[int, Any]]:
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def wait(rank: int) -> None:
        try:
            answers.put((rank, receive(rank)))
        except Exception as error:
            answers.put((rank, error))

    for rank in ranks:
        Thread(target=wait, args=(rank,), daemon=True).start()
    return answers


def send_vectors(vectors: dict[str, Tensor], to: int) -> None:
    """Sends named tensors (on the CPU) to a process."""
    send([(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in vectors.items()], to)
    for value in vectors.values():
        dist.send(value.contiguous(), to)


def receive_vectors(source: int) -> tuple[dict[str, Tensor], int]:
    """The named tensors that a process sent, and the number of their bytes."""
    forms, size = receive(source)
    vectors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in forms}
    for value in vectors.values():
        dist.recv(value, source)
    return vectors, size + sum(value.nbytes for value in vectors.values())
