"""A client's round as a transformers.Trainer: callbacks, accumulation, mixed precision and several processes as there.

trainer = FederatedTrainer(client, broadcast, args, train_dataset=rows, data_collator=collator)
upload = trainer.fit()                                  # or trainer.train(), then trainer.finish()
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint

from fedllm.common.errors import UserError
from fedllm.deployment.client import Client
from fedllm.deployment.messages import Broadcast, Upload
from fedllm.deployment.optimizer import FederatedOptimizer

_OPTIMIZER_FILE = "optimizer.pt"
_BY_ALGORITHM = "leave it out; the algorithm is the optimizer, with settings of its own"
# What a Trainer would do to the algorithm's steps: argument -> (value that leaves them alone, what to do instead).
_NEEDED: dict[str, tuple[Any, str]] = {
    "lr_scheduler_type": ("constant", "the algorithm has a schedule of its own, its setting `schedule`"),
    "max_grad_norm": (0.0, "the algorithm clips gradients itself, with its setting `clip_norm`"),
}
_REFUSED = {
    **dict.fromkeys(("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay"), _BY_ALGORITHM),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), _BY_ALGORITHM),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "lr_scheduler_kwargs"), _NEEDED["lr_scheduler_type"][1]),
    "load_best_model_at_end": "the upload is what the round's last step left",
    "auto_find_batch_size": "it begins the round again with other batches; set per_device_train_batch_size",
    "deepspeed": "it shards the optimizer, which holds the whole round; several GPUs work with torchrun alone",
    "fsdp": "it shards the parameters, which are one vector here; several GPUs work with torchrun alone",
    "parallelism_config": "it shards the parameters, which are one vector here; several GPUs work with torchrun alone",
}
_PARTS = {
    "model_init": "the model is client.model",
    "optimizers": "the algorithm is the optimizer",
    "optimizer_cls_and_kwargs": "the algorithm is the optimizer",
}


class FederatedTrainer(Trainer):
    """Trains one round of a client, from a broadcast to its upload.

    args: a constant learning rate and no clipping are set here where they have transformers' defaults, as both would
    change the algorithm; `seed` counts from the round, so that each round has an order of its own. The number of steps
    is args.max_steps, or that of args.num_train_epochs; at most info.local_steps. tracked: as in Client.finish. The
    other arguments are those of Trainer; model, if given, is client.model.

    Gradients are those of the mean over all samples of a step, or over all learned tokens of a causal language model:
    those of its accumulated batches and of all processes. With torchrun each process makes the same client and upload,
    and the first one sends it.

    A checkpoint contains the unfinished round: with a Client in the state that it began with and the same broadcast,
    resume_from_checkpoint goes on bit for bit.

    Raises UserError, naming the argument, for what would change the algorithm or cannot work.
    """

    def __init__(
        self,
        client: Client,
        broadcast: Broadcast,
        args: TrainingArguments | None = None,
        *,
        tracked: bool = True,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        if model is not None and model is not client.model:
            raise UserError("model: found another than client.model, expected that one, or none")
        if client.algorithm.start_loss is not None:
            raise UserError(
                f"client.algorithm: found {type(client.algorithm).__name__}, which reads the loss of the first step; a "
                "Trainer does not hand it to its optimizer; use Client.fit"
            )
        for name, why in _PARTS.items():
            if others.get(name) not in (None, (None, None)):
                raise UserError(f"{name}: found one, expected none: {why}")
        args = _checked(args or TrainingArguments("tmp_trainer", save_strategy="no", report_to=[]), broadcast)
        self._client, self._broadcast, self._tracked = client, broadcast, tracked
        self._round: FederatedOptimizer | None = None
        super().__init__(client.model, args, **others)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            name = "deepspeed" if self.is_deepspeed_enabled else "fsdp"
            raise UserError(f"{name}: found it in accelerate's settings, expected none: {_REFUSED[name]}")
        if self.is_model_parallel or self.args.n_gpu > 1:
            raise UserError(
                f"model: found it on several GPUs of one process ({self.args.n_gpu}), expected one; start a process "
                "for each with torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )
        self.model_accepts_loss_kwargs = (
            True  # else batches that are accumulated are weighed alike, whatever their size
        )
        base = self.accelerator.unwrap_model(client.model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._shifts = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def fit(self, resume_from_checkpoint: str | bool | None = None) -> Upload:
        """Trains the round and returns the upload."""
        self.train(resume_from_checkpoint)
        return self.finish()

    def finish(self) -> Upload:
        """Ends the round that `train` trained, as Client.finish does."""
        if self._round is None:
            raise UserError("the round has not been trained; call train() before finish()")
        return self._client.finish(self._round, self._tracked)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **others: Any) -> Any:
        """Trainer.train. Raises UserError for a checkpoint without this round."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[no-untyped-call]
        if isinstance(resume_from_checkpoint, str) and not Path(resume_from_checkpoint, _OPTIMIZER_FILE).is_file():
            raise UserError(
                f"{resume_from_checkpoint}: found no {_OPTIMIZER_FILE}, which holds the unfinished round; "
                "train without save_only_model, or start the round anew"
            )
        return super().train(resume_from_checkpoint, *args, **others)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Begins the round with the broadcast."""
        steps, most = self.state.max_steps, self._client.info.local_steps
        if steps > most:
            raise UserError(
                f"args.max_steps: the arguments and the data make {steps:,} steps, expected at most {most:,}, the "
                f"federation's local steps; set max_steps={most}"
            )
        self.optimizer = self._round = self._client.begin(self._broadcast, steps)
        return self._round

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The batches of one step, and the number of samples or learned tokens in those of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [self._items(batch) for batch in batches]
        if not counts or any(count is None for count in counts):
            return batches, None
        total = torch.stack([count.to(device) for count in counts if count is not None]).sum()
        return batches, self.accelerator.reduce(total, "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The batch's part of the step's mean loss. A model's own use of num_items_in_batch is not relied upon: many
        take it and ignore it."""
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = self._items(inputs) if model.training and num_items_in_batch is not None else None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if items is not None:
            loss = loss * (items * self.accelerator.num_processes / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _items(self, batch: Any) -> Tensor | None:
        """What the mean loss of a batch is the mean over: its labels that are learned. None if it has no labels."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            return None
        return (labels[..., 1:] if self._shifts else labels).ne(-100).sum()


def _checked(args: TrainingArguments, broadcast: Broadcast) -> TrainingArguments:
    """A copy of the arguments with what the algorithm needs. Raises UserError for what contradicts it."""
    defaults = {each.name: _default(each) for each in fields(args)}
    for name, what in _REFUSED.items():
        found = getattr(args, name, None)
        if found and found != defaults.get(name):
            raise UserError(f"args.{name}: found {_text(found)}, expected none of your own: {what}")
    args = copy.copy(args)
    for name, (needed, what) in _NEEDED.items():
        found = getattr(args, name)
        if found not in (needed, defaults[name]):
            raise UserError(f"args.{name}: found {_text(found)}, expected {needed}: {what}")
        setattr(args, name, needed)
    args.seed += broadcast.round
    return args


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
