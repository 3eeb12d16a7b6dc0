"""The server of a real federation, whose clients run elsewhere (see `fedllm.deployment.client`).

server = Server(algorithm, x0, info)                    # info must equal the clients', see client.model_info
broadcast = server.broadcast(client=3)                  # each round: the message to one sampled client
why = server.add(upload, client=3)                      # adds its upload; None, or the reason for rejection
x = server.aggregate()                                  # ends the round: the next global model
server.save("server.safetensors")                       # if the server may be restarted
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedllm.aggregation.downloads import encode
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy import PrivateMean, from_system
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.reduction import aggregate, require_enough
from fedllm.aggregation.settings import EXACT, MEAN, PLAIN, DownloadsSettings, RobustSettings, UploadsSettings
from fedllm.aggregation.upload_checks import fault
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, lengths
from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, under
from fedllm.deployment.client import require_gradient
from fedllm.deployment.messages import Broadcast, Upload, disagreement, privacy_terms, terms
from fedllm.deployment.upload_head import head_fault, unknown_client
from fedllm.federation.setup import BUFFERS
from fedllm.federation.turns import Turn
from fedllm.problems.base import Buffers

_DTYPES = (torch.float32, torch.float64)
_HEAD_BYTES = 65_536  # upper bound for the head of an upload
_REASON = 500  # longest reason for a rejection, in characters, so that a client cannot fill the log


class Server:
    """Holds the global model x [d] and the algorithm's server vectors `state`, and updates them once per round.

    With the same clients it computes the same sums as `simulate`. round: the current round, from 0. rejected: client ->
    reason, in the current round. counted: client -> receipt of its last upload that counted. gradient: the mean [d] of
    all N clients' full gradients at x (see client.full_gradient), if the algorithm needs it. To continue from another
    state, set round, x and state. uploads, downloads: what happens to the vectors that clients send and receive, as at
    the clients. robust: how the uploads are reduced; clients do not need to know. privacy: noise on their sums, drawn
    from the system's generator and written nowhere. A client asks for it with the same `privacy`, and without one does
    not compare it. buffers [b]: of a model with batch norm, the mean of what the clients sent last. turns: what the
    rounds train in turn, see federation.turns; clients receive all of x, and send and receive the turn's part of the
    other vectors.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        x: Tensor,
        info: RoundInfo,
        gradient: Tensor | None = None,
        buffers: Buffers | None = None,
        uploads: UploadsSettings = PLAIN,
        robust: RobustSettings = MEAN,
        downloads: DownloadsSettings = EXACT,
        privacy: PrivacySettings | None = None,
        turns: tuple[Turn, ...] = (),
    ) -> None:
        self.algorithm, self.info, self._turns = algorithm, info, turns
        if not isinstance(x, Tensor) or x.shape != (info.blocks.dim,) or x.dtype not in _DTYPES:
            is_found = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x: found {is_found}, expected a tensor [{info.blocks.dim}] of float32 or float64")
        self.round, self.x = 0, x.detach().clone()
        if algorithm.needs_full_gradient():
            require_gradient(gradient, x, "Server(..., gradient=the mean of all clients')")
            self.state = algorithm.init_server(self.x, info, gradient)
        else:
            self.state = algorithm.init_server(self.x, info)
        self._buffers = buffers
        self.buffers = None if buffers is None else buffers.initial.to(self.x)
        self.counted: dict[int, str] = {}
        if why := robust.misfit(algorithm, info.sampled, info.tracked):
            raise UserError(why)
        self._robust, self._sent_as = robust, downloads
        # The seed draws nothing: a server only reads, and its noise comes from the system.
        self._pipeline = Pipeline.of(uploads, algorithm, 0, robust, privacy, from_system)
        self._terms = {**terms(algorithm, info, uploads, downloads), **privacy_terms(privacy)}
        self._open()

    def _open(self) -> None:
        self._turn = self._turns[self.round % len(self._turns)] if self._turns else None
        self._now = replace(self.info, index=self.round)
        x = self.x
        if self._turn is not None:
            self._now, x = self._turn.facts(self._now), self._turn.take(x)
        self._declared = Declared.by(self.algorithm, x, self._now)
        if self.buffers is not None:
            sent = {**self._declared.sent, BUFFERS: len(self.buffers)}
            self._declared = replace(self._declared, sent=sent)
        self._reduction = self._pipeline.reduction(self.algorithm, self._declared, self._now, self.x.device)
        self._receipts: dict[int, str] = {}
        self.rejected: dict[int, str] = {}

    def broadcast(self, client: int | None = None) -> Broadcast:
        """Returns the message for a sampled client. With `client`, it also names that client's last counted upload.

        Raises UserError if `client` is not in 0 to N - 1."""
        if client is not None and (why := unknown_client(client, self.info.num_clients)):
            raise UserError(why)
        server = self.downloads()
        x, *_ = encode({"": self.x}, [""], self._sent_as).values()
        counted = None if client is None else self.counted.get(client, "")
        return Broadcast(
            self.round,
            x,
            encode(server, self.algorithm.downloads(), self._sent_as),
            self._terms,
            counted,
            self._start(),
        )

    def downloads(self) -> State:
        """The vectors that a client receives beside x, by name."""
        found = {name: self.state[name] for name in self.algorithm.downloads()}
        found = found if self._turn is None else self._turn.take_all(found)
        if self.buffers is None or self._buffers is None or self._buffers.local:
            return found
        return {**found, BUFFERS: self.buffers}

    @property
    def most_bytes(self) -> int:
        """The most bytes that an upload may have."""
        return sum(self._declared.sent.values()) * self.x.element_size() + _HEAD_BYTES

    @property
    def accepted(self) -> list[int]:
        """The clients whose uploads of this round were accepted."""
        return list(self._receipts)

    @property
    def fewest(self) -> int:
        """The accepted uploads without which `robust` makes no result of a round."""
        return 1 if self._robust.faulty is None else self._robust.least(self._robust.faulty)

    def left_out(self) -> dict[int, str]:
        """The clients with an accepted upload that `aggregate` would leave out, each with the reason, see `robust`.

        Raises RunError for fewer uploads than the rule needs. More may be added afterwards."""
        return self._reduction.settle(len(self.rejected))

    def mean_update(self) -> Tensor:
        """The update [d] (float64) that stands for those accepted in this round: their mean, by the aggregation's
        weights, or what the robust rule makes of them after `left_out`."""
        return self._whole(self._reduction.mean_update())

    def update_of(self, upload: Upload) -> Tensor:
        """d [1, d] of an upload that was accepted."""
        return self._whole(self._received(upload).sent["d"].to(self.x.device))

    def _whole(self, update: Tensor) -> Tensor:
        """An update [..., d], which is 0 where this round trains nothing."""
        if self._turn is None:
            return update
        return self._turn.put(update.new_zeros(*update.shape[:-1], len(self.x)), update)

    def _start(self) -> str:
        """A digest of the round and x. It differs between runs, and after the server was restored and x changed."""
        return tensor_file.digest(str(self.round), {"x": self.x})

    def add(self, upload: Upload | bytes | bytearray, *, client: int, samples: int | None = None) -> str | None:
        """Adds a client's upload to the round, or returns why it is rejected. No content of an upload raises an error.

        A rejected upload has no effect on the round's result. upload: an Upload, or the bytes of Upload.to_bytes.
        client: 0 to N - 1, as authenticated by the transport. samples: number of samples that the client holds;
        replaces the upload's own number.
        """
        if why := unknown_client(client, self.info.num_clients):
            return why
        if isinstance(upload, bytes | bytearray):
            if len(upload) > self.most_bytes:
                return self._reject(client, f"found {len(upload):,} bytes, expected at most {self.most_bytes:,}")
            try:
                upload = Upload.from_bytes(bytes(upload))
            except UserError as error:
                return self._reject(client, str(error))
        samples = upload.samples if samples is None and isinstance(upload, Upload) else samples
        if client in self._receipts:
            return self._reject(client, "has sent its upload already")
        if why := head_fault(upload, self.algorithm, replace(self._now, index=self.round), samples, self._start):
            return self._reject(client, why)
        received = self._received(upload)
        if why := received.rejected.get(0):
            return self._reject(client, why)
        untracked = {name: size for name, size in self._declared.sent.items() if name not in received.sent}
        sent = {name: value.to(self.x.device) for name, value in received.sent.items()}
        sent |= {name: self.x.new_zeros(1, size) for name, size in untracked.items()}
        rows = Rows(
            steps=self.x.new_tensor([[upload.steps]]),
            rate_sum=self.x.new_tensor([[upload.rate_sum]], dtype=torch.float64),
            tracked=torch.tensor([[upload.tracked]], device=self.x.device),
        )
        weight = 1 if self.algorithm.weights == "uniform" else samples
        self._reduction.add(
            Uploads(sent, {}, clients=[client]), rows, [0], self.x.new_tensor([weight], dtype=torch.float64)
        )
        self._receipts[client] = upload.receipt
        self.rejected.pop(client, None)
        return None

    def _reject(self, client: int, why: str) -> str:
        why = why if len(why) <= _REASON else f"{why[:_REASON]}..."
        if client not in self._receipts:
            self.rejected[client] = why
        return why

    def _received(self, upload: Upload) -> Uploads:
        """The vectors that the upload's tensors stand for, after the server's part of the steps on uploads."""
        missing = () if upload.tracked else self.algorithm.tracked_uploads()
        expected = {name: size for name, size in self._declared.sent.items() if name not in missing}
        declared = replace(self._declared, sent=expected)
        found = self._pipeline.read(upload.tensors, declared)
        if isinstance(found, str):
            return Uploads({}, {}, rejected={0: found})
        received = Uploads(found, {})
        self._pipeline.receive(received, declared, 1)
        return received

    def aggregate(self, min_clients: int = 1) -> Tensor:
        """Ends the round and returns the next global model [d].

        The clients of `left_out` do not count. Raises RunError if fewer than min_clients uploads were accepted or the
        result is not finite. The round then stays open. With client-level privacy no number is too small: at least the
        noise is released."""
        left_out = self.left_out()
        if not self.private:
            require_enough(self._reduction.clients, min_clients, self.rejected | left_out, self.round)
        reduced, turn = self._reduction.result(), self._turn
        if turn is None:
            self.x, self.state = aggregate(self.algorithm, self.x, self.state, reduced, self._now)
        else:
            given = (turn.take(self.x), turn.take_all(self.state))
            x, state = aggregate(self.algorithm, *given, reduced, self._now)
            self.x, self.state = turn.put(self.x, x), turn.put_all(self.state, state)
        self.buffers = reduced.mean.get(BUFFERS)
        self.counted |= {client: receipt for client, receipt in self._receipts.items() if client not in left_out}
        self.round += 1
        self._open()
        return self.x

    def skip(self) -> Tensor:
        """Ends a round for which no client was sampled, and returns the global model [d].

        The round counts. The model stays as it is; with client-level privacy noise alone is added."""
        if self.private:
            return self.aggregate()
        self.round += 1
        self._open()
        return self.x

    @property
    def private(self) -> bool:
        """Whether the server adds the noise of client-level privacy."""
        return self._pipeline.private

    @property
    def noise_ratio(self) -> float | None:
        """The length of the noise in D over that of D without it, for the uploads so far; None without privacy."""
        return self._reduction.noise_ratio("d") if isinstance(self._reduction, PrivateMean) else None

    def save(self, path: str | Path) -> None:
        """Writes the server's state at the start of this round, atomically. Raises RunError if it cannot be written.

        Call it after `aggregate` and before the next broadcast. Then no client has seen a round newer than the file."""
        counted = {str(client): receipt for client, receipt in self.counted.items()}
        head = {
            "round": self.round,
            "counted": counted,
            "terms": self._terms,
        }
        beside = {} if self.buffers is None else {BUFFERS: self.buffers}
        tensors = {"x": self.x, **beside, **{f"server/{name}": value for name, value in self.state.items()}}
        tensor_file.write(path, tensor_file.pack(head, tensors))

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote; the server is then at the start of that round.

        Raises UserError, naming the file, if it is damaged or of another federation."""
        head, tensors = tensor_file.read(path)
        if head.keys() != {"round", "counted", "terms"}:
            raise UserError(f"{path}: found {sorted(head)}, expected what Server.save writes")
        if why := disagreement(head["terms"], self._terms):
            raise UserError(f"{path}: {why}; the file is of another federation")
        kept = lengths(self.algorithm.server_vectors(), self.x, self.info)
        vectors = {f"server/{name}": size for name, size in kept.items()}
        beside = {} if self.buffers is None else {BUFFERS: len(self.buffers)}
        if why := fault(tensors, {"x": len(self.x), **beside, **vectors}, self.x.dtype):
            raise UserError(f"{path}: {why}")
        tensors = {name: value.to(self.x.device) for name, value in tensors.items()}
        self.round, self.x, self.state = head["round"], tensors["x"], under("server/", tensors)
        self.buffers = tensors.get(BUFFERS)
        self.counted = {int(client): receipt for client, receipt in head["counted"].items()}
        self._open()
