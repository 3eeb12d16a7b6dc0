"""The processes that torchrun or accelerate started, and the messages between rank 0 and each of the others.

A message is JSON and, after it, the tensors' plain bytes, never pickle, over a connection that is closed by the system
the moment either side dies. What is sent goes through the CPU on every device, so that GPUs take the path that the
tests take.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fedllm.algorithms.base import State
from fedllm.errors import RunError

Message = tuple[dict[str, Any], State]
_MEETING = timedelta(minutes=5)  # for all processes to start


class LostError(Exception):
    """The process at the other end is gone."""


class StoppedError(RunError):
    """This process has to end: it was asked to (SIGTERM), or another one is lost."""


def rank() -> int:
    """This process's number among those started together; 0 where there is one."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size() -> int:
    """How many of them were started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


class Links:
    """Rank 0's connections to every other process, or the one connection of another process to rank 0.

    timeout: seconds that a process waits for another one.
    """

    def __init__(self, connections: dict[int, Connection], size: int) -> None:
        self._connections, self.size = connections, size
        self.timeout: float = _MEETING.total_seconds()

    def send(self, rank: int, head: dict[str, Any], tensors: State) -> None:
        """Raises OSError where the other end is gone."""
        connection = self._connections[rank]
        forms = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()]
        connection.send_bytes(json.dumps([head, forms]).encode())
        for value in tensors.values():
            rest = _bytes(value.detach().cpu().contiguous())
            while rest:
                rest = rest[os.write(connection.fileno(), rest) :]

    def ready(self, ranks: list[int], timeout: float) -> list[int]:
        """Those that have sent something, or are gone; returns as soon as there is one, or after `timeout` seconds."""
        links = {self._connections[rank]: rank for rank in ranks}
        return sorted(links[link] for link in wait(list(links), timeout) if isinstance(link, Connection))

    def receive(self, rank: int) -> Message:
        """The next message of a process that is ready. LostError where it is gone."""
        connection = self._connections[rank]
        tensors: State = {}
        try:
            head, forms = json.loads(connection.recv_bytes())
            for name, dtype, shape in forms:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                rest = _bytes(tensors[name])
                while rest:
                    if not (read := os.readv(connection.fileno(), [rest])):
                        raise EOFError
                    rest = rest[read:]
        except (EOFError, OSError) as error:
            raise LostError from error
        return head, tensors

    def close(self) -> None:
        """Ends the connections, and with them the workers at their other ends. This process is about to end too."""
        ending()
        for connection in self._connections.values():
            connection.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _bytes(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return value.reshape(-1).view(torch.uint8).numpy().data


def meet() -> Links:
    """Connects the processes that were started together. RunError where they do not all come within five minutes."""
    store, rank, size = next(iter(rendezvous("env://", timeout=_MEETING)))
    store = PrefixStore("fedllm", store)
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        store.set(f"here/{rank}", "")
        host, port = store.get("address").decode().rsplit(":", 1)
        link = Client((host, int(port)), authkey=store.get("key"))
        link.send_bytes(rank.to_bytes(8, "little"))
        return Links({0: link}, size)
    signal.signal(signal.SIGTERM, _stop)
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    key = secrets.token_hex(32)
    with Listener(("127.0.0.1" if one_machine else "", 0), backlog=size, authkey=key.encode()) as listener:
        host = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]
        store.set("key", key)
        store.set("address", f"{host}:{listener.address[1]}")
        try:
            store.wait([f"here/{other}" for other in range(1, size)], _MEETING)
        except torch.distributed.DistError as error:
            raise RunError(f"not all of {size} processes started within {_MEETING}: {error}") from error
        connections = {}
        for _ in range(size - 1):
            link = listener.accept()
            connections[int.from_bytes(link.recv_bytes(), "little")] = link
    return Links(connections, size)


def ending() -> None:
    """From now on SIGTERM is ignored: this process ends by itself, and is not to be cut off while it says why."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(*_: object) -> None:
    raise StoppedError("stopped (SIGTERM); the same command goes on from the last checkpoint")
