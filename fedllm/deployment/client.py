"""One client of a real federation: runs the algorithms inside any training loop (HF Trainer, a Flower site).

client = Client(model, algorithm, info)                 # once per site; info must equal the server's, see model_info
upload = client.fit(broadcast, batches)                 # each round: the built-in loop, or
optimizer = client.begin(broadcast, steps=len(batches)) #   any loop that calls optimizer.step()
upload = client.finish(optimizer)
client.save("client.safetensors")                       # before the upload is sent, if the site may be restarted

The server is in `fedllm.deployment.server`. docs/guides/sites/own_program.md shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedllm.aggregation.upload_checks import fault, faults, misfit
from fedllm.algorithms.base import Algorithm, RoundInfo, lengths
from fedllm.blocks import BlockPartition, RoleError, partition
from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, under
from fedllm.deployment.messages import Broadcast, Upload, check_broadcast, disagreement, terms
from fedllm.deployment.optimizer import FederatedOptimizer
from fedllm.federation.info import run_info
from fedllm.models.fingerprint import fingerprint
from fedllm.models.flat_parameters import ParameterSpace

__all__ = ["Broadcast", "Client", "FederatedOptimizer", "Upload", "full_gradient", "model_blocks", "model_info"]

Loss = Callable[[nn.Module, Any], Tensor]


class Client:
    """A site with its own model and data. `state` {name: [1, d] or [1, B]} holds its vectors between rounds.

    info: must equal the server's, see model_info. If the algorithm sends block means and info has no blocks, the blocks
    of `model` are used. samples: number of samples that the site holds, for `weights: size`. gradient: the full local
    gradient [d] at x0 (see full_gradient), required under `tracking_init: gradient`. state: the vectors of an earlier
    session; None for a new client. Raises UserError if any of these does not fit.

    The server may never count an upload: it may be lost, late or rejected. The state must then be the one from before
    that upload. So the client stores the states before and after each upload of a round. The next broadcast, made by
    `server.broadcast(client)`, names the last upload that counted, and the client restores the state of that upload.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        info: RoundInfo,
        *,
        samples: int = 1,
        gradient: Tensor | None = None,
        state: State | None = None,
    ) -> None:
        self.model, self.algorithm, self.samples = model, algorithm, int(samples)
        x = ParameterSpace.of(model).gather(model)
        if info.blocks.dim != len(x):
            raise UserError(
                f"info.blocks: found {info.blocks.dim:,} coordinates, expected {len(x):,}, the model's size"
            )
        no_blocks = info.blocks.num_blocks == info.blocks.dim
        self.info = replace(info, blocks=model_blocks(algorithm, model) or info.blocks) if no_blocks else info
        self.state = self._first(x, gradient) if state is None else state
        self._lengths, self._dtype = lengths(algorithm.client_vectors(), x, self.info), x.dtype
        if why := misfit(self.state, {name: (1, size) for name, size in self._lengths.items()}, x.dtype):
            raise UserError(f"state: {why}")
        self._receipt = ""  # of the upload that produced `state`; "" before the first upload
        self._round = -1  # the last round begun
        self._others: dict[str, State] = {}  # earlier states by receipt, to restore if that upload does not count

    def _first(self, x: Tensor, gradient: Tensor | None) -> State:
        if not self.algorithm.needs_full_gradient():
            return self.algorithm.init_clients(x[None], self.info)
        require_gradient(gradient, x, "Client(..., gradient=full_gradient(model, x0, batches))")
        assert gradient is not None
        return self.algorithm.init_clients(x[None], self.info, gradient[None])

    def begin(self, broadcast: Broadcast, steps: int) -> FederatedOptimizer:
        """Sets the model to the broadcast and returns the optimizer of this round.

        Raises UserError for a broadcast that does not fit, and if this client has no state for the upload that the
        broadcast names as the last counted. The client is then as before."""
        x = ParameterSpace.of(self.model).gather(self.model)
        check_broadcast(broadcast, x, self.algorithm, self.info)  # before the state follows what it says
        self._settle(broadcast)
        return FederatedOptimizer(self.model, self.algorithm, self.info, broadcast, self.state, steps)

    def finish(self, optimizer: FederatedOptimizer, tracked: bool = True) -> Upload:
        """Ends the round: stores the client's new vectors and returns its upload.

        Raises RunError, naming the tensor, if either is not finite; the state is then unchanged."""
        upload, kept = optimizer.end(tracked, self.samples)
        self._others[self._receipt] = self.state
        self._receipt, self.state = upload.receipt, kept
        return upload

    def _settle(self, broadcast: Broadcast) -> None:
        """Restores the state of the last upload that counted, if the broadcast names one."""
        states = {**self._others, self._receipt: self.state}
        counted = self._receipt if broadcast.counted is None or not self._lengths else broadcast.counted
        if counted not in states:
            raise UserError(
                f"broadcast of round {broadcast.round}: the last upload of this client that counted is "
                f"{counted[:12] or 'none'}, but its state came with {self._receipt[:12] or 'none'}; load the newest "
                "that Client.save wrote, or none where the federation begins anew; to go on all the same, begin with "
                "replace(broadcast, counted=None)"
            )
        self._receipt, self.state = counted, states.pop(counted)
        self._others = states if broadcast.round == self._round else {}  # uploads of earlier rounds can no longer count
        self._round = broadcast.round

    def save(self, path: str | Path) -> None:
        """Writes the client's states to a file, atomically. Raises RunError if the file cannot be written."""
        states = {**self._others, self._receipt: self.state}
        head = {"receipts": list(states), "round": self._round, "terms": terms(self.algorithm, self.info)}
        tensors = {f"{place}/{name}": v for place, kept in enumerate(states.values()) for name, v in kept.items()}
        tensor_file.write(path, tensor_file.pack(head, tensors))

    def load(self, path: str | Path) -> None:
        """Restores what `save` wrote. Raises UserError, naming the file, if it is damaged or of another federation."""
        head, tensors = tensor_file.read(path)
        if head.keys() != {"receipts", "round", "terms"}:
            raise UserError(f"{path}: found {sorted(head)}, expected what Client.save writes")
        if why := disagreement(head["terms"], terms(self.algorithm, self.info)):
            raise UserError(f"{path}: {why}; the file is of another federation")
        states = {receipt: under(f"{place}/", tensors) for place, receipt in enumerate(head["receipts"])}
        for state in states.values():
            if why := faults(state, self._lengths, self._dtype, 1).get(0):
                raise UserError(f"{path}: {why}")
        self._receipt, self.state = states.popitem()
        self._others, self._round = states, head["round"]

    def fit(
        self,
        broadcast: Broadcast,
        batches: Sequence[Any] | Iterable[Any],
        loss: Loss | None = None,
        tracked: bool = True,
    ) -> Upload:
        """Trains one round, one step per batch, and returns the upload.

        loss(model, batch) returns a scalar; the default is model(**batch).loss, as in Hugging Face models. The model's
        train or eval mode is not changed: call model.train() first for dropout.
        """
        batches = list(batches)
        optimizer = self.begin(broadcast, steps=len(batches))
        for batch in batches:
            optimizer.zero_grad()
            (loss or _own_loss)(self.model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return self.finish(optimizer, tracked)


def full_gradient(model: nn.Module, x: Tensor, batches: Sequence[Any], loss: Loss | None = None) -> Tensor:
    """Computes the gradient [d] at x [d] of the mean loss over `batches`. Every batch has the same weight.

    The model's parameters are x afterwards. Its train or eval mode is not changed: call model.eval() first to disable
    dropout.
    """
    space = ParameterSpace.of(model)
    space.scatter(model, x)
    model.zero_grad()
    for batch in batches:
        ((loss or _own_loss)(model, batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
    found = space.gather(model, grad=True)
    model.zero_grad()
    return found


def model_info(
    algorithm: Algorithm,
    model: nn.Module,
    *,
    rounds: int,
    num_clients: int,
    sampled: int,
    tracked: int | None = None,
    local_steps: int,
) -> RoundInfo:
    """Builds the RoundInfo on which a Client and the Server must agree, for a federation that trains `model`.

    Server and clients each call it. A client reports the first difference when a broadcast was made with another info.
    info.model is a digest of the trainable parameters' names and shapes, the adapters' scaling, and a sample of each
    frozen weight. replace(info, model="") turns this comparison off, for sites whose base models differ on purpose, for
    example if some are quantised.

    rounds: number of rounds of the run. num_clients: N. sampled: S, clients per round. tracked: T of these, default S.
    local_steps: K, the most steps that a client takes per round. Raises UserError for numbers that do not fit together
    or do not fit the algorithm, or for a model with weights of unknown role.
    """
    blocks = model_blocks(algorithm, model) or BlockPartition.elementwise(ParameterSpace.of(model).dim)
    info = run_info(
        blocks, rounds=rounds, num_clients=num_clients, sampled=sampled, tracked=tracked, local_steps=local_steps
    )
    algorithm.check(info)
    return replace(info, model=fingerprint(model))


def model_blocks(algorithm: Algorithm, model: nn.Module) -> BlockPartition | None:
    """The block partition of the model that the algorithm needs; None if the algorithm uses no blocks."""
    if not algorithm.needs_blocks():
        return None
    try:
        return partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(
            f"{error}, as info=replace(info, blocks=partition(model, unknown='tensor')) for the server and every client"
        ) from error


def require_gradient(gradient: Tensor | None, x: Tensor, how: str) -> None:
    """Raises UserError if the full gradient for `tracking_init: gradient` is missing or does not fit x [d]."""
    if gradient is None:
        raise UserError(f"tracking_init: gradient starts from full gradients at x0: give them, {how}")
    if why := fault({"gradient": gradient}, {"gradient": len(x)}, x.dtype):
        raise UserError(why)


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
