"""One client on its own: the same algorithms for training loops that are not ours (HF Trainer, a Flower site).

client = Client(model, algorithm, info)                 # once, on the site; info as the server has it, see model_info
upload = client.fit(broadcast, batches)                 # each round: our plain loop, or
optimizer = client.begin(broadcast, steps=len(batches)) #   any loop that calls optimizer.step()
upload = client.finish(optimizer)
client.save("client.safetensors")                       # before the upload leaves, for a site that may be restarted

Its other half is `fedllm.server`; docs/real_sites.md has both at work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedllm import parcel
from fedllm.algorithms.base import Algorithm, RoundInfo, State, lengths
from fedllm.blocks import BlockPartition, RoleError, partition
from fedllm.errors import UserError
from fedllm.messages import Broadcast, Upload, disagreement, terms
from fedllm.optimizer import FederatedOptimizer
from fedllm.rounds import run_info
from fedllm.space import ParameterSpace
from fedllm.training import under
from fedllm.uploads import fault, faults, misfit

__all__ = ["Broadcast", "Client", "FederatedOptimizer", "Upload", "full_gradient", "model_blocks", "model_info"]

Loss = Callable[[nn.Module, Any], Tensor]
_SAMPLE = 1024  # of each frozen tensor's values, to tell one base from another


class Client:
    """A site with its own model and data. `state` {name: [1, d]} is what it keeps from round to round.

    info: the federation's, see model_info. Its blocks are those of `model` where the algorithm sends block means and
    info has none. samples: that the site holds, for `weights: size`. gradient: the full local gradient [d] at x0 (see
    full_gradient), which the algorithm asks for under `tracking_init: gradient`. state: what it kept, if it is not new.
    Raises UserError where any of these does not fit.

    An upload may be lost, late or rejected, and then the state must be what it was before it. So a client that has sent
    one keeps both, and goes back when the next broadcast, if it is `server.broadcast(client)`, says which one counted.
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
        self._receipt = ""  # of the upload that `state` came with
        self._round = -1  # the last one begun
        self._others: dict[str, State] = {}  # what `state` has to become if that upload does not count, by receipt

    def _first(self, x: Tensor, gradient: Tensor | None) -> State:
        if not self.algorithm.needs_full_gradient():
            return self.algorithm.init_clients(x[None], self.info)
        require_gradient(gradient, x, "Client(..., gradient=full_gradient(model, x0, batches))")
        assert gradient is not None
        return self.algorithm.init_clients(x[None], self.info, gradient[None])

    def begin(self, broadcast: Broadcast, steps: int) -> FederatedOptimizer:
        """Sets the model to the broadcast and returns the optimizer of this round.

        UserError if what counted last, as the broadcast says, came with a state that this client does not have."""
        self._settle(broadcast)
        return FederatedOptimizer(self.model, self.algorithm, self.info, broadcast, self.state, steps)

    def finish(self, optimizer: FederatedOptimizer, tracked: bool = True) -> Upload:
        """Ends the round: keeps the client's vectors and returns its upload. Where either is not finite, RunError names
        the tensor and the state stays as it was."""
        upload, kept = optimizer.end(tracked, self.samples)
        self._others[self._receipt] = self.state
        self._receipt, self.state = upload.receipt, kept
        return upload

    def _settle(self, broadcast: Broadcast) -> None:
        """Goes back to the state after the last upload that counted, where the broadcast says which that was."""
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
        self._others = states if broadcast.round == self._round else {}  # an upload of an earlier round comes too late
        self._round = broadcast.round

    def save(self, path: str | Path) -> None:
        """Writes what the client keeps, whole or not at all. RunError where it cannot be written."""
        states = {**self._others, self._receipt: self.state}
        head = {"receipts": list(states), "round": self._round, "terms": terms(self.algorithm, self.info)}
        tensors = {f"{place}/{name}": v for place, kept in enumerate(states.values()) for name, v in kept.items()}
        parcel.write(path, parcel.pack(head, tensors))

    def load(self, path: str | Path) -> None:
        """Goes on with what `save` wrote. UserError, naming the file, if it is damaged or another federation's."""
        head, tensors = parcel.read(path)
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
        """A round over `batches`, one step each; returns the upload.

        loss(model, batch): a scalar; by default model(**batch).loss, as Hugging Face models give it. The model stays in
        the mode it is in: model.train() is for dropout.
        """
        batches = list(batches)
        optimizer = self.begin(broadcast, steps=len(batches))
        for batch in batches:
            optimizer.zero_grad()
            (loss or _own_loss)(self.model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return self.finish(optimizer, tracked)


def full_gradient(model: nn.Module, x: Tensor, batches: Sequence[Any], loss: Loss | None = None) -> Tensor:
    """The gradient [d] at x [d] of the mean loss over `batches`, each of which weighs the same; the model is left at x.

    The model's mode is the caller's: model.eval() leaves dropout out.
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
    """What a Client and the Server must agree on, for a federation that trains `model`; each makes its own.

    A client that is given another server's broadcast says in what they differ. Of the model it tells names and shapes
    of what is trained, the scaling of adapters, and a sample of each frozen weight; replace(info, model="") leaves
    that out, for sites whose bases are to differ, as where some are quantised.

    rounds: of the run. num_clients: N. sampled: S of them in a round. tracked: T of those, default S. local_steps: K,
    the most that a client takes. Raises UserError for numbers that do not fit together, or a model without known roles.
    """
    blocks = model_blocks(algorithm, model) or BlockPartition.elementwise(ParameterSpace.of(model).dim)
    info = run_info(
        blocks, rounds=rounds, num_clients=num_clients, sampled=sampled, tracked=tracked, local_steps=local_steps
    )
    return replace(info, model=_fingerprint(model))


def _fingerprint(model: nn.Module) -> str:
    """A digest of what must be alike in the models of all sites, "" for one without values. Frozen weights are compared
    in bfloat16, so that they may be stored in either precision; the head that PEFT has replaced plays no part."""
    if any(value.is_meta for value in model.parameters()):
        return ""
    found = hashlib.sha256()
    for name, module in model.named_modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):  # of LoRA
            found.update(f"{name} {scaling}\n".encode())
    for name, value in model.named_parameters():
        if value.requires_grad:
            found.update(f"{name} {list(value.shape)}\n".encode())
        elif value.is_floating_point() and ".original_module." not in name:
            some = value.detach().reshape(-1)[:: value.numel() // _SAMPLE + 1].to("cpu", torch.bfloat16)
            found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def model_blocks(algorithm: Algorithm, model: nn.Module) -> BlockPartition | None:
    """The partition of the model that the algorithm asks for; None if it has no use for blocks."""
    if not algorithm.needs_blocks():
        return None
    try:
        return partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(
            f"{error}, as info=replace(info, blocks=partition(model, unknown='tensor')) for the server and every client"
        ) from error


def require_gradient(gradient: Tensor | None, x: Tensor, how: str) -> None:
    """Raises UserError unless the full gradient that `tracking_init: gradient` starts from is there and fits x [d]."""
    if gradient is None:
        raise UserError(f"tracking_init: gradient starts from full gradients at x0: give them, {how}")
    if why := fault({"gradient": gradient}, {"gradient": len(x)}, x.dtype):
        raise UserError(why)


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
