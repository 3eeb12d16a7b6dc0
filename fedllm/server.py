"""The server on its own, for federations whose clients are elsewhere (see `fedllm.client`).

server = Server(algorithm, x0, info)                    # info as the clients have it, see client.model_info
broadcast = server.broadcast(client=3)                  # each round: to the clients of the round,
why = server.add(upload, client=3)                      # their uploads as they come; None, or why it was rejected,
x = server.aggregate()                                  # and the next global model
server.save("server.safetensors")                       # for a server that may be restarted
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedllm import parcel
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, lengths
from fedllm.client import require_gradient
from fedllm.errors import UserError
from fedllm.messages import Broadcast, Upload, disagreement, terms
from fedllm.reduction import Reduction, aggregate, require_enough
from fedllm.training import under
from fedllm.uploads import fault, faults

_DTYPES = (torch.float32, torch.float64)
_HEAD_BYTES = 65_536  # more than the head of any upload
_REASON = 500  # characters, for a log, whatever a client sent


class Server:
    """The global model x [d] and the algorithm's server vectors `state`, moved on by one round after the other.

    With the same clients it computes what `simulate` does, from the same sums. round: the one under way, from 0.
    rejected: of this round, client -> why. counted: client -> receipt of its last upload that counted. gradient: mean
    [d] over all N clients of their full gradients at x (see client.full_gradient), where the algorithm asks for it. To
    go on from elsewhere, set round, x and state.
    """

    def __init__(self, algorithm: Algorithm, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> None:
        self.algorithm, self.info = algorithm, info
        if not isinstance(x, Tensor) or x.shape != (info.blocks.dim,) or x.dtype not in _DTYPES:
            is_found = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x: found {is_found}, expected a tensor [{info.blocks.dim}] of float32 or float64")
        self.round, self.x = 0, x.detach().clone()
        if algorithm.needs_full_gradient():
            require_gradient(gradient, x, "Server(..., gradient=the mean of all clients')")
            self.state = algorithm.init_server(self.x, info, gradient)
        else:
            self.state = algorithm.init_server(self.x, info)
        self.counted: dict[int, str] = {}
        self._open()

    def _open(self) -> None:
        self._reduction = Reduction(self.algorithm, self.x, self.info)
        self._heard: dict[int, str] = {}
        self.rejected: dict[int, str] = {}

    def broadcast(self, client: int | None = None) -> Broadcast:
        """What to send to a client of the round; with its number it also tells it which of its uploads counted last.
        UserError for a number that is none of the federation's."""
        if client is not None and (why := self._stranger(client)):
            raise UserError(why)
        server = {name: self.state[name] for name in self.algorithm.downloads()}
        counted = None if client is None else self.counted.get(client, "")
        return Broadcast(self.round, self.x, server, terms(self.algorithm, self.info), counted, self._start())

    def _start(self) -> str:
        """What tells this round of this run from that of another run, or of this one before the server went back."""
        return parcel.digest(str(self.round), {"x": self.x})

    def add(self, upload: Upload | bytes | bytearray, *, client: int, samples: int | None = None) -> str | None:
        """Counts a client's upload, or says why it is rejected: then it counts nowhere. Nothing in it raises.

        upload: as it came, also as Upload.to_bytes gave it. client: 0 to N - 1, whom the transport has identified.
        samples: that the client holds, where the server knows better than the upload.
        """
        if why := self._stranger(client):
            return why
        if isinstance(upload, bytes | bytearray):
            most = sum(self._reduction.lengths.values()) * self.x.element_size() + _HEAD_BYTES
            if len(upload) > most:
                return self._reject(client, f"found {len(upload):,} bytes, expected at most {most:,}")
            try:
                upload = Upload.from_bytes(bytes(upload))
            except UserError as error:
                return self._reject(client, str(error))
        samples = upload.samples if samples is None and isinstance(upload, Upload) else samples
        if why := self._refusal(upload, client, samples):
            return self._reject(client, why)
        untracked = {name: size for name, size in self._reduction.lengths.items() if name not in upload}
        sent = {name: value.to(self.x.device) for name, value in upload.items()}
        sent |= {name: self.x.new_zeros(1, size) for name, size in untracked.items()}
        rows = Rows(
            steps=self.x.new_tensor([[upload.steps]]),
            rate_sum=self.x.new_tensor([[upload.rate_sum]], dtype=torch.float64),
            tracked=torch.tensor([[upload.tracked]], device=self.x.device),
        )
        weight = 1 if self.algorithm.weights == "uniform" else samples
        self._reduction.add(sent, rows, [0], self.x.new_tensor([weight], dtype=torch.float64))
        self._heard[client] = upload.receipt
        self.rejected.pop(client, None)
        return None

    def _stranger(self, client: Any) -> str | None:
        if _whole(client, 0, last := self.info.num_clients - 1):
            return None
        return f"client: found {_shown(client)}, expected 0 to {last}, num_clients less one"

    def _reject(self, client: int, why: str) -> str:
        why = why if len(why) <= _REASON else f"{why[:_REASON]}..."
        if client not in self._heard:
            self.rejected[client] = why
        return why

    def _refusal(self, upload: Upload, client: int, samples: int | None) -> str | None:
        if not isinstance(upload, Upload):
            return f"found {type(upload).__name__}, expected an Upload, as Client.finish gives it, or its bytes"
        if client in self._heard:
            return "has sent its upload already"
        if self.round >= self.info.total:
            return f"the {self.info.total} rounds of the run are over"
        if upload.round != self.round:
            return f"round: found {_shown(upload.round)}, expected {self.round}"
        if upload.start and upload.start != (start := self._start()):
            return f"start: found {_shown(upload.start)}, expected {_shown(start)}: it began with another x"
        if not _whole(upload.steps, 1, self.info.local_steps):
            return f"steps: found {_shown(upload.steps)}, expected 1 to {self.info.local_steps}, the federation's"
        most = self._most_rate(upload.steps)
        if not isinstance(upload.rate_sum, int | float) or not 0 < upload.rate_sum <= most:
            return f"rate_sum: found {_shown(upload.rate_sum)}, expected a number above 0, at most {most:.3g}"
        if not isinstance(upload.tracked, bool):
            return f"tracked: found {_shown(upload.tracked)}, expected true or false"
        if self.algorithm.weights == "size" and not _whole(samples, 1, 2**53):
            return f"samples: found {_shown(samples)}, expected a whole number above 0"
        missing = () if upload.tracked else self.algorithm.tracked_uploads()
        expected = {name: size for name, size in self._reduction.lengths.items() if name not in missing}
        return faults(upload.tensors, expected, self.x.dtype, 1).get(0)

    def _most_rate(self, steps: int) -> float:
        """The sum of so many of the round's highest rate, and a little for rounding."""
        info = replace(self.info, index=self.round)
        return 1.001 * steps * float(self.algorithm.rates(torch.tensor([info.local_steps]), info).max())

    def aggregate(self, min_clients: int = 1) -> Tensor:
        """Ends the round: the next global model [d]. RunError, and the round stays open, where fewer than min_clients
        uploads were accepted or the result is not finite."""
        require_enough(self._reduction.clients, min_clients, self.rejected, self.round)
        info = replace(self.info, index=self.round)
        self.x, self.state = aggregate(self.algorithm, self.x, self.state, self._reduction.result(), info)
        self.counted |= self._heard
        self.round += 1
        self._open()
        return self.x

    def save(self, path: str | Path) -> None:
        """Writes the server as it was when this round began, whole or not at all. RunError where it cannot be written.

        To be called after `aggregate` and before the next broadcast: clients then never know more than the file."""
        counted = {str(client): receipt for client, receipt in self.counted.items()}
        head = {"round": self.round, "counted": counted, "terms": terms(self.algorithm, self.info)}
        tensors = {"x": self.x, **{f"server/{name}": value for name, value in self.state.items()}}
        parcel.write(path, parcel.pack(head, tensors))

    def load(self, path: str | Path) -> None:
        """Goes on with what `save` wrote, at the beginning of that round. UserError, naming the file, if it is damaged
        or another federation's."""
        head, tensors = parcel.read(path)
        if head.keys() != {"round", "counted", "terms"}:
            raise UserError(f"{path}: found {sorted(head)}, expected what Server.save writes")
        if why := disagreement(head["terms"], terms(self.algorithm, self.info)):
            raise UserError(f"{path}: {why}; the file is of another federation")
        kept = lengths(self.algorithm.server_vectors(), self.x, self.info)
        vectors = {f"server/{name}": size for name, size in kept.items()}
        if why := fault(tensors, {"x": len(self.x), **vectors}, self.x.dtype):
            raise UserError(f"{path}: {why}")
        tensors = {name: value.to(self.x.device) for name, value in tensors.items()}
        self.round, self.x, self.state = head["round"], tensors["x"], under("server/", tensors)
        self.counted = {int(client): receipt for client, receipt in head["counted"].items()}
        self._open()


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: Any) -> str:
    """Short enough for a log."""
    return reprlib.repr(value)
