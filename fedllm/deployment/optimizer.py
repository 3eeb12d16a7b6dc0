"""An algorithm's local steps as a torch optimizer, for use in any training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import EXACT, PLAIN, DownloadsSettings, UploadsSettings
from fedllm.aggregation.upload_checks import misfit
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms.base import Algorithm, RoundInfo, Rows, clip
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.deployment.messages import Broadcast, Upload, check_broadcast
from fedllm.deployment.outgoing import outgoing
from fedllm.models.flat_parameters import ParameterSpace

Loss = float | Tensor


class FederatedOptimizer(torch.optim.Optimizer):
    """An algorithm's local steps on one model, as a torch optimizer.

    The trainable parameters of `model`, in named_parameters order, form one row [1, d]. The constructor sets them to
    broadcast.x, on the device they are on. x and all other vectors are float64 if the parameters are, else float32;
    parameters of lower precision are set to the nearest values. steps: number of steps of this round, at most
    info.local_steps; schedules within a round need it. client: this client's stored vectors {name: [1, d]}.

    A learning-rate scheduler may lower the group's `lr`. The algorithm's formulas then divide by the sum of the
    learning rates really used. By default transformers.Trainer lowers the learning rate to 0 and clips gradients to
    norm 1, which is another algorithm. Set lr_scheduler_type="constant" and max_grad_norm=0.0; `schedule` and
    `clip_norm` are settings of the algorithm.

    state_dict contains the unfinished local round. So resume_from_checkpoint continues the round, after `begin` with
    the same broadcast.

    uploads, downloads, number: see Client.

    Raises UserError for a broadcast that does not fit the model or the algorithm, naming the tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        info: RoundInfo,
        broadcast: Broadcast,
        client: State,
        steps: int,
        *,
        uploads: UploadsSettings = PLAIN,
        downloads: DownloadsSettings = EXACT,
        number: int = 0,
    ) -> None:
        self.space = ParameterSpace.of(model)
        start = self.space.gather(model)
        check_broadcast(broadcast, start, algorithm, info, uploads=uploads, downloads=downloads)
        self._uploads, self._number = uploads, number
        if not isinstance(steps, int) or not 1 <= steps <= info.local_steps:
            raise UserError(f"steps: found {steps!r}, expected 1 to {info.local_steps}, the federation's local steps")
        if algorithm.contrastive:
            raise UserError(
                f"algorithm: found {type(algorithm).__name__}, whose clients add a contrast to the loss, which an "
                "optimizer does not compute; train with a recipe, or choose another algorithm, such as fedprox"
            )
        algorithm.check(info, [steps])
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": algorithm.base_rate(info)})
        self._model, self._algorithm, self._client = model, algorithm, _on(start, client)
        server = {name: broadcast.server[name].to(start) for name in algorithm.downloads()}
        self._broadcast = broadcast = replace(broadcast, x=broadcast.x.to(start), server=server)
        self._info = replace(info, index=broadcast.round, blocks=info.blocks.to(start.device))
        self._rates = algorithm.rates(torch.tensor([steps]), self._info).to(broadcast.x)
        self._rate_sum = torch.zeros_like(self._rates[:, :1])
        self._steps = 0
        self._local = algorithm.begin(broadcast.x[None], broadcast.server, self._client, self._info)
        self.space.scatter(model, broadcast.x)

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """One local step with the gradients in the parameters' .grad.

        closure: returns the batch's loss, and may first compute the gradients. QFedAvg reads the loss of the first
        step. Raises UserError past the announced number of steps, and where a loss is needed and none is given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._steps == self._rates.shape[1]:
            raise UserError(f"step {self._steps + 1}: the round was begun with steps={self._steps}; begin it with more")
        scale = self.param_groups[0]["lr"] / self.defaults["lr"]
        eta = self._rates[:, self._steps : self._steps + 1] * scale
        g = clip(self.space.gather(self._model, grad=True)[None], self._algorithm.clip_norm)
        if self._steps == 0 and self._algorithm.start_loss is not None:
            self._local[self._algorithm.start_loss].fill_(self._known(loss))
        self._steps += 1
        self._rate_sum += eta
        self._algorithm.step(self._local, g, self._steps, eta, self._info)
        self.space.scatter(self._model, self._local["x"][0])
        return loss

    def _known(self, loss: Loss | None) -> Loss:
        if loss is None:
            raise UserError(
                f"step 1: {type(self._algorithm).__name__} reads the loss of the first batch, found none; call "
                "step(loss.detach) with the batch's loss, or use Client.fit"
            )
        return loss

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, and under "local" the unfinished round: number, steps, sum of learning rates, vectors."""
        local = {"round": self._info.index, "steps": self._steps, "rate_sum": self._rate_sum, "vectors": self._local}
        return {**super().state_dict(), "local": {**local, "start": self._broadcast.start}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a `state_dict` of this round and this broadcast, and sets the model to its x.

        Raises UserError if it belongs to another round."""
        local, shapes = state_dict.get("local"), {name: tuple(value.shape) for name, value in self._local.items()}
        if local is None:
            raise UserError("optimizer state: found none of a FederatedOptimizer's local round; start the round anew")
        why = misfit(local["vectors"], shapes, self._broadcast.x.dtype)
        if local["round"] != self._info.index:
            why = f"found round {local['round']}, expected {self._info.index}, the broadcast's"
        elif local.get("start", "") != self._broadcast.start:
            why = "found one that began with another x, expected the broadcast's"
        elif local["steps"] > self._rates.shape[1]:
            why = f"found {local['steps']} steps taken, expected at most {self._rates.shape[1]}, as the round was begun"
        if why:
            raise UserError(f"optimizer state: {why}; start the round anew")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "local"})
        self._steps, self._rate_sum = local["steps"], local["rate_sum"].clone().to(self._rate_sum)
        self._local = {name: value.clone().to(self._local[name]) for name, value in local["vectors"].items()}
        self.space.scatter(self._model, self._local["x"][0])

    def end(self, tracked: bool = True, samples: int = 1) -> tuple[Upload, State]:
        """Ends the round: returns the upload and the client's new state {name: [1, d] or [1, B]}.

        Raises RunError, naming the tensor, if either is not finite; the client's old state remains valid."""
        if self._steps == 0:
            raise UserError("the round ends without a step; call optimizer.step() at least once")
        rows = Rows(
            steps=torch.full_like(self._rate_sum, self._steps),
            rate_sum=self._rate_sum,
            tracked=torch.tensor([[tracked]], device=self._rate_sum.device),
        )
        alg, info, x, server = self._algorithm, self._info, self._broadcast.x[None], self._broadcast.server
        upload, kept = alg.end(self._local, x, server, self._client, rows, info)
        uploads = Uploads(upload, kept, self._client, [self._number], info.index)
        pipeline = Pipeline.of(self._uploads, alg, seed=0)
        sent = outgoing(uploads, Declared.by(alg, x, info), pipeline, alg, tracked=tracked, round=info.index)
        start = self._broadcast.start
        return Upload(sent, info.index, self._steps, float(self._rate_sum), samples, tracked, start), uploads.kept


def _on(x: Tensor, vectors: State) -> State:
    """Moves the vectors to the device of x."""
    return {name: value.to(x.device) for name, value in vectors.items()}
