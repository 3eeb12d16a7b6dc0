"""One client on its own: the same algorithms for training loops that are not ours (HF Trainer, a Flower site).

client = Client(model, algorithm, info)                 # once, on the site; info as the server has it, see model_info
upload = client.fit(broadcast, batches)                 # each round: our plain loop, or
optimizer = client.begin(broadcast, steps=len(batches)) #   any loop that calls optimizer.step()
upload = client.finish(optimizer)

Its other half is `fedllm.server`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, State, clip, lengths
from fedllm.blocks import BlockPartition, RoleError, partition
from fedllm.errors import RunError, UserError
from fedllm.messages import Broadcast, Upload, check_broadcast
from fedllm.rounds import run_info
from fedllm.space import ParameterSpace
from fedllm.uploads import fault, faults, misfit

__all__ = ["Broadcast", "Client", "FederatedOptimizer", "Upload", "full_gradient", "model_blocks", "model_info"]

Loss = Callable[[nn.Module, Any], Tensor]


class FederatedOptimizer(torch.optim.Optimizer):
    """An algorithm's local steps on one model, as a torch optimizer.

    The trainable parameters of `model`, in named_parameters order, are the one row of the algorithm's matrix; they are
    set to broadcast.x at once. steps: how many steps will be taken, for schedules within a round, at most
    info.local_steps. A learning-rate scheduler may scale the group's `lr`; the rates really used are what the
    algorithm's formulas divide by. client: the vectors {name: [1, d]} that this client kept.

    transformers.Trainer by default lets the rate fall to 0 and clips every gradient to norm 1, which is another
    algorithm: set lr_scheduler_type="constant" and max_grad_norm=0.0 (schedules and clip_norm are the algorithm's).
    state_dict holds the local round, so that resume_from_checkpoint goes on where it was, after the same begin.

    Raises UserError for a broadcast that does not fit the model or the algorithm, naming the tensor.
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm, info: RoundInfo, broadcast: Broadcast, client: State, steps: int
    ) -> None:
        self.space = ParameterSpace.of(model)
        check_broadcast(broadcast, self.space.gather(model), algorithm, info)
        if not isinstance(steps, int) or not 1 <= steps <= info.local_steps:
            raise UserError(f"steps: found {steps!r}, expected 1 to {info.local_steps}, the federation's local steps")
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": algorithm.base_rate(info)})
        self._model, self._algorithm, self._broadcast, self._client = model, algorithm, broadcast, client
        self._info = replace(info, index=broadcast.round)
        self._rates = algorithm.rates(torch.tensor([steps]), self._info).to(broadcast.x)
        self._rate_sum = torch.zeros_like(self._rates[:, :1])
        self._steps = 0
        self._local = algorithm.begin(broadcast.x[None], broadcast.server, client, self._info)
        self.space.scatter(model, broadcast.x)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One local step with the gradients in the parameters' .grad. UserError past the announced number of steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._steps == self._rates.shape[1]:
            raise UserError(f"step {self._steps + 1}: the round was begun with steps={self._steps}; begin it with more")
        scale = self.param_groups[0]["lr"] / self.defaults["lr"]
        eta = self._rates[:, self._steps : self._steps + 1] * scale
        g = clip(self.space.gather(self._model, grad=True)[None], self._algorithm.clip_norm)
        self._steps += 1
        self._rate_sum += eta
        self._algorithm.step(self._local, g, self._steps, eta, self._info)
        self.space.scatter(self._model, self._local["x"][0])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under "local" the round so far: its number, the steps taken, their rates' sum, the vectors."""
        local = {"round": self._info.index, "steps": self._steps, "rate_sum": self._rate_sum, "vectors": self._local}
        return {**super().state_dict(), "local": local}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, in this round and under this broadcast; the model is set to its x.

        Raises UserError if it is not one of this round."""
        local, shapes = state_dict.get("local"), {name: tuple(value.shape) for name, value in self._local.items()}
        if local is None:
            raise UserError("optimizer state: found none of a FederatedOptimizer's local round; start the round anew")
        why = misfit(local["vectors"], shapes, self._broadcast.x.dtype)
        if local["round"] != self._info.index:
            why = f"found round {local['round']}, expected {self._info.index}, the broadcast's"
        elif local["steps"] > self._rates.shape[1]:
            why = f"found {local['steps']} steps taken, expected at most {self._rates.shape[1]}, as the round was begun"
        if why:
            raise UserError(f"optimizer state: {why}; start the round anew")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local"})
        self._steps, self._rate_sum = local["steps"], local["rate_sum"].clone().to(self._rate_sum)
        self._local = {name: value.clone().to(self._local[name]) for name, value in local["vectors"].items()}
        self.space.scatter(self._model, self._local["x"][0])

    def end(self, tracked: bool = True, samples: int = 1) -> tuple[Upload, State]:
        """What to send and what to keep {name: [1, d]} after the round. RunError, naming the tensor, if it is not
        finite: what the client kept before is then still good."""
        if self._steps == 0:
            raise UserError("the round ends without a step; call optimizer.step() at least once")
        rows = Rows(
            steps=torch.full_like(self._rate_sum, self._steps),
            rate_sum=self._rate_sum,
            tracked=torch.tensor([[tracked]], device=self._rate_sum.device),
        )
        alg, info, x, server = self._algorithm, self._info, self._broadcast.x[None], self._broadcast.server
        upload, kept = alg.end(self._local, x, server, self._client, rows, info)
        for vectors, found in (({**alg.uploads(), **alg.tracked_uploads()}, upload), (alg.client_vectors(), kept)):
            for why in faults(found, lengths(vectors, x, info), x.dtype, 1).values():
                raise RunError(
                    f"round {info.index + 1}: {why}; nothing was sent, and the client's state is as before the round. "
                    "Lower algorithm.lr, set algorithm.clip_norm, or look for bad values in the round's batches"
                )
        left_out = () if tracked else alg.tracked_uploads()
        sent = {name: value for name, value in upload.items() if name not in left_out}
        return Upload(sent, info.index, self._steps, float(self._rate_sum), samples, tracked), kept


class Client:
    """A site with its own model and data. `state` {name: [1, d]} is what it keeps from round to round.

    info: the federation's, see model_info. Its blocks are those of `model` where the algorithm sends block means and
    info has none. samples: that the site holds, for `weights: size`. gradient: the full local gradient [d] at x0 (see
    full_gradient), which the algorithm asks for under `tracking_init: gradient`. state: what it kept, if it is not new.
    Raises UserError where any of these does not fit.
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
        self.model, self.algorithm, self.samples = model, algorithm, samples
        x = ParameterSpace.of(model).gather(model)
        if info.blocks.dim != len(x):
            raise UserError(
                f"info.blocks: found {info.blocks.dim:,} coordinates, expected {len(x):,}, the model's size"
            )
        no_blocks = info.blocks.num_blocks == info.blocks.dim
        self.info = replace(info, blocks=model_blocks(algorithm, model) or info.blocks) if no_blocks else info
        self.state = self._first(x, gradient) if state is None else state
        shapes = {name: (1, size) for name, size in lengths(algorithm.client_vectors(), x, self.info).items()}
        if why := misfit(self.state, shapes, x.dtype):
            raise UserError(f"state: {why}")

    def _first(self, x: Tensor, gradient: Tensor | None) -> State:
        if not self.algorithm.needs_full_gradient():
            return self.algorithm.init_clients(x[None], self.info)
        require_gradient(gradient, x, "Client(..., gradient=full_gradient(model, x0, batches))")
        assert gradient is not None
        return self.algorithm.init_clients(x[None], self.info, gradient[None])

    def begin(self, broadcast: Broadcast, steps: int) -> FederatedOptimizer:
        """Sets the model to the broadcast and returns the optimizer of this round."""
        return FederatedOptimizer(self.model, self.algorithm, self.info, broadcast, self.state, steps)

    def finish(self, optimizer: FederatedOptimizer, tracked: bool = True) -> Upload:
        """Ends the round: keeps the client's vectors and returns its upload. Where either is not finite, RunError names
        the tensor and the state stays as it was."""
        upload, self.state = optimizer.end(tracked, self.samples)
        return upload

    def fit(
        self,
        broadcast: Broadcast,
        batches: Sequence[Any] | Iterable[Any],
        loss: Loss | None = None,
        tracked: bool = True,
    ) -> Upload:
        """A round over `batches`, one step each; returns the upload.

        loss(model, batch): a scalar; by default model(**batch).loss, as Hugging Face models give it.
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
    """What a Client and the Server must agree on, for a federation that trains `model`.

    rounds: of the run. num_clients: N. sampled: S of them in a round. tracked: T of those, default S. local_steps: K,
    the most that a client takes. Raises UserError for numbers that do not fit together, or a model without known roles.
    """
    blocks = model_blocks(algorithm, model) or BlockPartition.elementwise(ParameterSpace.of(model).dim)
    return run_info(
        blocks, rounds=rounds, num_clients=num_clients, sampled=sampled, tracked=tracked, local_steps=local_steps
    )


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
