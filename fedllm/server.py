"""The server on its own, for federations whose clients are elsewhere (see `fedllm.client`).

server = Server(algorithm, x0, info)                    # info as the clients have it, see client.model_info
broadcast = server.broadcast()                          # each round: to the clients of the round,
why = server.add(upload, client=3)                      # their uploads as they come; None, or why it was rejected,
x = server.aggregate()                                  # and the next global model
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows
from fedllm.client import require_gradient
from fedllm.errors import UserError
from fedllm.messages import Broadcast, Upload
from fedllm.reduction import Reduction, aggregate, require_enough
from fedllm.uploads import faults


class Server:
    """The global model x [d] and the algorithm's server vectors `state`, moved on by one round after the other.

    With the same clients it computes what `simulate` does, from the same sums. round: the one under way, from 0.
    rejected: of this round, client -> why. gradient: mean [d] over all N clients of their full gradients at x (see
    client.full_gradient), where the algorithm asks for it. To go on from elsewhere, set round, x and state.
    """

    def __init__(self, algorithm: Algorithm, x: Tensor, info: RoundInfo, gradient: Tensor | None = None) -> None:
        self.algorithm, self.info = algorithm, info
        if not isinstance(x, Tensor) or x.shape != (info.blocks.dim,) or not x.is_floating_point():
            is_found = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x: found {is_found}, expected a tensor [{info.blocks.dim}] of float32 or float64")
        self.round, self.x = 0, x.detach().clone()
        if algorithm.needs_full_gradient():
            require_gradient(gradient, x, "Server(..., gradient=the mean of all clients')")
            self.state = algorithm.init_server(self.x, info, gradient)
        else:
            self.state = algorithm.init_server(self.x, info)
        self._open()

    def _open(self) -> None:
        self._reduction = Reduction(self.algorithm, self.x, self.info)
        self._heard: set[int] = set()
        self.rejected: dict[int, str] = {}

    def broadcast(self) -> Broadcast:
        """What to send to each client of the round."""
        return Broadcast(self.round, self.x, {name: self.state[name] for name in self.algorithm.downloads()})

    def add(self, upload: Upload, *, client: int, samples: int | None = None) -> str | None:
        """Counts a client's upload, or says why it is rejected: then it counts nowhere.

        samples: that the client holds, where the server knows better than the upload.
        """
        samples = upload.samples if samples is None and isinstance(upload, Upload) else samples
        if why := self._refusal(upload, client, samples):
            if client not in self._heard:
                self.rejected[client] = why
            return why
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
        self._heard.add(client)
        self.rejected.pop(client, None)
        return None

    def _refusal(self, upload: Upload, client: int, samples: int | None) -> str | None:
        if not isinstance(upload, Upload):
            return f"found {type(upload).__name__}, expected an Upload, as Client.finish gives it"
        if client in self._heard:
            return "has sent its upload already"
        if upload.round != self.round:
            return f"round: found {upload.round}, expected {self.round}"
        if not _positive(upload.rate_sum) or not _positive(upload.steps):
            return f"steps, rate_sum: found {upload.steps}, {upload.rate_sum}, expected positive numbers"
        if not isinstance(upload.tracked, bool):
            return f"tracked: found {upload.tracked!r}, expected true or false"
        if self.algorithm.weights == "size" and not _positive(samples):
            return f"samples: found {samples}, expected a positive number"
        missing = () if upload.tracked else self.algorithm.tracked_uploads()
        lengths = {name: size for name, size in self._reduction.lengths.items() if name not in missing}
        return faults(upload.tensors, lengths, self.x.dtype, 1).get(0)

    def aggregate(self, min_clients: int = 1) -> Tensor:
        """Ends the round: the next global model [d]. RunError, and the round stays open, where fewer than min_clients
        uploads were accepted or the result is not finite."""
        require_enough(self._reduction.clients, min_clients, self.rejected, self.round)
        info = replace(self.info, index=self.round)
        self.x, self.state = aggregate(self.algorithm, self.x, self.state, self._reduction.result(), info)
        self.round += 1
        self._open()
        return self.x


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
