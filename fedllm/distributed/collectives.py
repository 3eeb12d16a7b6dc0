"""The executor of several processes: every process runs the same program, and a round ends in collectives."""

from __future__ import annotations

import secrets
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedllm.common.errors import RunError, UserError
from fedllm.common.profiling import section
from fedllm.common.tensors import State
from fedllm.distributed import point_to_point
from fedllm.distributed.process_group import StoppedError, TerminatedError, abandon_group
from fedllm.federation.client_states import ClientStore, ClientVectors, VectorFile
from fedllm.federation.executor import CHUNK, Executor, Note, add_in_order

T = TypeVar("T")


class Collectives(Executor):
    """This process among `size`, which all make the same calls in the same order. The process group must be open.

    device: where this process computes; tensors travel from there with NCCL, and through the CPU with gloo.
    timeout: seconds that one process waits for another, for errors.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.bytes_received = 0
        self._device = device if "nccl" in dist.get_backend() else torch.device("cpu")
        self._timeout = timeout
        self._sharing: set[int] = set()  # ranks that reach the run folder's files
        self._holders: dict[int, set[int]] = {}  # client -> ranks that have its newest vectors
        self._folder = Path()  # of the files that ranks in _sharing reach
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def _others(self) -> range:
        return range(1, self.size)

    # Plain data

    def on_first(self, work: Callable[[], T]) -> T:
        def waiting(rank: int) -> str:
            return "waiting for process 0" if rank else "deciding what all processes do next"

        if self.rank:
            answer = self._receive_from_first(waiting)
            if "error" in answer:
                raise (UserError if answer["kind"] == "UserError" else RunError)(answer["error"])
            value: T = answer["value"]
            return value
        try:
            value = work()
        except TerminatedError:
            raise
        except Exception as error:
            self._send_to_others({"error": str(error), "kind": _kind(error)}, waiting)
            raise
        self._send_to_others({"value": value}, waiting)
        return value

    def together(self, work: Callable[[], tuple[T, Note]], doing: Callable[[int], str]) -> tuple[T, list[Note]]:
        try:
            done: tuple[T, Note] | Exception = work()
        except TerminatedError as error:
            raise point_to_point.who_is_lost(self._others, doing, self._timeout) or error from None
        except Exception as error:
            done = error
        answer = _error_note(done) if isinstance(done, Exception) else {"note": done[1]}
        with section("wait"):
            answers = self._exchange(answer, doing)
        if isinstance(done, Exception):
            raise done
        for rank, other in enumerate(answers):
            if "error" in other:
                raise _failed(rank, doing(rank), other)
        return done[0], [other["note"] for other in answers]

    def _exchange(self, value: Any, doing: Callable[[int], str]) -> list[Any]:
        """Every process's plain data, in the order of ranks."""
        if self.rank:
            self._guard(0, doing, point_to_point.send, value, 0)
            found: list[Any] = self._receive_from_first(doing)
            return found
        try:
            answers = point_to_point.receive_all(self._others, doing, self._timeout)
        except TerminatedError as error:
            raise point_to_point.who_is_lost(self._others, doing, self._timeout) or error from None
        self.bytes_received += sum(size for _, size in answers.values())
        found = [value, *(answers[rank][0] for rank in self._others)]
        self._send_to_others(found, doing)
        return found

    def _send_to_others(self, value: Any, doing: Callable[[int], str]) -> None:
        for rank in self._others:
            self._guard(rank, doing, point_to_point.send, value, rank)

    def _receive_from_first(self, doing: Callable[[int], str]) -> Any:
        value, size = self._guard(0, doing, point_to_point.receive, 0)
        self.bytes_received += size
        return value

    def _guard(self, rank: int, doing: Callable[[int], str], operation: Callable[..., T], *arguments: Any) -> T:
        """`operation`, which that process must answer; an error that names it where it does not."""
        try:
            return operation(*arguments)
        except RuntimeError as error:
            raise point_to_point.lost(rank, doing, error, self._timeout) from error

    # Sums

    def sum_parts(self, mine: Sequence[Tensor], count: int, like: Tensor) -> Tensor:
        """Each process adds all parts at its own run of coordinates; then every process gets all runs."""
        length = like.numel()
        width = -(-length // self.size)
        run = torch.zeros(width, dtype=like.dtype, device=self._device)
        own = self._sum_own([part.reshape(1, -1) for part in mine], count, like.reshape(1, -1), width)
        run[: own.shape[1]] = own[0]
        runs = [torch.empty_like(run) for _ in range(self.size)]
        with section("wait"):
            self._collective(dist.all_gather, runs, run)
        self.bytes_received += (self.size - 1) * run.nbytes
        return torch.cat(runs)[:length].view_as(like).to(like.device)

    def measure_sums(
        self, mine: Sequence[Tensor], count: int, like: Tensor, measure: Callable[[Tensor], Tensor]
    ) -> Tensor:
        chunks = -(-like.shape[1] // CHUNK)
        total = self._sum_own(mine, count, like, width=CHUNK * -(-chunks // self.size))
        terms = [measure(chunk).tolist() for chunk in torch.split(total, CHUNK, dim=1) if chunk.numel()]
        _, found = self.together(lambda: (None, terms), lambda rank: "measuring the clients' drift")
        return add_in_order([torch.tensor(term, dtype=like.dtype) for terms in found for term in terms])

    def _sum_own(self, mine: Sequence[Tensor], count: int, like: Tensor, width: int) -> Tensor:
        """The sum of all parts [k, n] at this process's run of at most `width` coordinates, of which process r has
        those from r * width on."""
        rows, length = like.shape
        widths = [max(0, min(width, length - rank * width)) for rank in range(self.size)]
        total = torch.zeros(rows, widths[self.rank], dtype=like.dtype, device=self._device)
        for first in range(0, count, self.size):  # part first + r is process r's
            senders = min(self.size, count - first)
            sends = self.rank < senders
            runs = torch.split(mine[first // self.size].to(self._device), width, dim=1) if sends else ()
            sent = torch.cat([run.reshape(-1) for run in runs]) if sends else total.new_empty(0)
            splits = [rows * wide if sends else 0 for wide in widths]
            received = total.new_empty(senders, *total.shape)
            from_each = [total.numel() if rank < senders else 0 for rank in range(self.size)]
            with section("wait"):
                self._collective(dist.all_to_all_single, received.view(-1), sent, from_each, splits)
            self.bytes_received += (senders - sends) * total.nbytes
            for part in received:
                total += part
        return total

    def from_first(self, tensors: State) -> State:
        found = {name: value.detach().to(self._device, copy=True).contiguous() for name, value in tensors.items()}
        for value in found.values():
            self._collective(dist.broadcast, value, 0)
            self.bytes_received += value.nbytes if self.rank else 0
        return {name: value.to(tensors[name].device) for name, value in found.items()}

    def _collective(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments)
        except RuntimeError as error:
            abandon_group()
            raise StoppedError(
                f"another process ended without a word while all exchanged their sums ({str(error).splitlines()[0]})"
            ) from error

    # Clients' vectors

    def share_folder(self, folder: Path) -> Path:
        """Rank 0 leaves a random text in the folder. A process that reads it shares the folder, whatever the machines'
        names are."""
        probe = folder / "probe"
        name, text = self.on_first(lambda: [str(folder.resolve()), _leave(probe)])
        _, found = self.together(
            lambda: (None, _reads(Path(name) / "probe", text)), lambda rank: "looking for the run folder"
        )
        self.on_first(probe.unlink)
        self._sharing = {rank for rank, reads in enumerate(found) if reads}
        self._holders, self._folder = {}, Path(name)
        if self.rank in self._sharing:
            return Path(name)
        self._own_folder = tempfile.TemporaryDirectory(prefix="fedllm-clients-")
        return Path(self._own_folder.name)

    def fetch(self, store: ClientStore, needed: Mapping[int, int] | None = None) -> None:
        wanted = dict.fromkeys(self._holders, 0) if needed is None else needed
        for client, to in sorted(wanted.items()):
            holders = self._holders.get(client)
            if holders is None or to in holders:
                continue
            source = min(holders)
            if self.rank == source:
                vectors = store.vectors(client)
                self._guard(to, _moving(client), point_to_point.send_vectors, vectors, to)
            elif self.rank == to:
                vectors, size = self._guard(source, _moving(client), point_to_point.receive_vectors, source)
                self.bytes_received += size
                store.put([client], {name: value[None] for name, value in vectors.items()})
            holders.add(to)

    def publish(self, store: ClientStore, mine: Mapping[int, ClientVectors], notes: Sequence[Note]) -> None:
        known, elsewhere = dict(mine), []
        for rank, entries in enumerate(notes):
            for client, name, sha256 in entries:
                in_folder = name is not None and rank in self._sharing
                self._holders[client] = set(self._sharing) if in_folder else {rank}
                if rank == self.rank:
                    continue
                if in_folder and self.rank in self._sharing:
                    known[client] = VectorFile(self._folder / name, sha256)
                else:
                    elsewhere.append(client)
        store.commit(known)
        store.forget(elsewhere)


def _error_note(error: Exception) -> dict[str, str]:
    """An error as plain data. One that is no message for a user keeps its traceback."""
    told = isinstance(error, UserError | RunError)
    text = str(error) if told else "".join(traceback.format_exception(error))
    return {"error": text, "kind": _kind(error)}


def _kind(error: Exception) -> str:
    return "UserError" if isinstance(error, UserError) else "RunError"


def _failed(rank: int, doing: str, answer: dict[str, str]) -> RunError | UserError:
    if answer["kind"] == "UserError":
        return UserError(f"process {rank}: {answer['error']}")
    return RunError(f"process {rank} failed while {doing}.\n{answer['error'].rstrip()}")


def _moving(client: int) -> Callable[[int], str]:
    return lambda rank: f"moving the vectors of client {client}"


def _leave(path: Path) -> str:
    text = secrets.token_hex(16)
    path.write_text(text)
    return text


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False
