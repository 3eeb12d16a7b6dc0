"""One client on its own: the same algorithms for training loops that are not ours (HF Trainer, a Flower site).

client = Client(model, algorithm, info)                 # once, on the site
upload = client.fit(broadcast, batches)                 # each round: our plain loop, or
optimizer = client.begin(broadcast, steps=len(batches)) #   any loop that calls optimizer.step()
upload = client.finish(optimizer)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, State, clip
from fedllm.errors import UserError
from fedllm.space import ParameterSpace

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Broadcast:
    """What the server sends for round `round` (from 0): x [d] and the algorithm's downloads."""

    round: int
    x: Tensor
    server: State


class FederatedOptimizer(torch.optim.Optimizer):
    """An algorithm's local steps on one model, as a torch optimizer.

    The trainable parameters of `model`, in named_parameters order, are the one row of the algorithm's matrix; they are
    set to broadcast.x at once. steps: how many steps will be taken, for schedules within a round. A learning-rate
    scheduler may scale the group's `lr`; the rates really used are what the algorithm's formulas divide by.
    client: the vectors {name: [1, d]} that this client kept.
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm, info: RoundInfo, broadcast: Broadcast, client: State, steps: int
    ) -> None:
        self.space = ParameterSpace.of(model)
        if broadcast.x.shape != (self.space.dim,):
            raise UserError(
                f"broadcast x: found {list(broadcast.x.shape)}, expected [{self.space.dim}], the model's size"
            )
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

    def end(self, tracked: bool = True) -> tuple[State, State]:
        """What to send {name: [1, n]} and what to keep {name: [1, d]} after the round."""
        if self._steps == 0:
            raise UserError("the round ends without a step; call optimizer.step() at least once")
        rows = Rows(
            steps=torch.full_like(self._rate_sum, self._steps),
            rate_sum=self._rate_sum,
            tracked=torch.tensor([[tracked]], device=self._rate_sum.device),
        )
        x, server = self._broadcast.x[None], self._broadcast.server
        upload, kept = self._algorithm.end(self._local, x, server, self._client, rows, self._info)
        left_out = () if tracked else self._algorithm.tracked_uploads()
        return {name: value for name, value in upload.items() if name not in left_out}, kept


class Client:
    """A site with its own model and data. `state` {name: [1, d]} is what it keeps from round to round."""

    def __init__(self, model: nn.Module, algorithm: Algorithm, info: RoundInfo) -> None:
        self.model, self.algorithm, self.info = model, algorithm, info
        self.state = algorithm.init_clients(ParameterSpace.of(model).gather(model)[None], info)

    def begin(self, broadcast: Broadcast, steps: int) -> FederatedOptimizer:
        """Sets the model to the broadcast and returns the optimizer of this round."""
        return FederatedOptimizer(self.model, self.algorithm, self.info, broadcast, self.state, steps)

    def finish(self, optimizer: FederatedOptimizer, tracked: bool = True) -> State:
        """Ends the round: keeps the client's vectors and returns its upload {name: [1, n]}."""
        upload, self.state = optimizer.end(tracked)
        return upload

    def fit(
        self,
        broadcast: Broadcast,
        batches: Sequence[Any] | Iterable[Any],
        loss: Loss | None = None,
        tracked: bool = True,
    ) -> State:
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


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
