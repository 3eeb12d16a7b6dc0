"""What fedllm is timed against: a bare loop, transformers.Trainer, and Flower's simulation engine."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

from benchmarks.workload import LR, Plain, Work, mean, token_labels, train_client


def loop(work: Work, plain: Plain) -> Tensor:
    """One client after another on one model that stays in memory; a batch is padded to its longest sample."""
    x = work.job.problem.initial()
    return mean(train_client(plain, work.job, x, batches) for batches in work.batches)


def _rows(work: Work, batches: list[Tensor]) -> list[dict[str, object]]:
    """The samples of a client's batches: ids, and a class or the ids of the learned tokens, -100 elsewhere."""
    tokens = work.job.problem.rows.tokens
    found: list[dict[str, object]] = []
    for i in torch.cat(batches).tolist():
        ids = tokens.input_ids[tokens.offsets[i] : tokens.offsets[i + 1]].tolist()
        learned = tokens.learned is not None
        labels = token_labels(tokens, torch.tensor([i]))[0].tolist() if learned else int(tokens.targets[i])
        found.append({"input_ids": ids, "labels": labels})
    return found


class _Rows(Dataset[dict[str, object]]):
    def __init__(self, work: Work, batches: list[Tensor]) -> None:
        self._rows = _rows(work, batches)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self._rows[index]


class _InOrder(Trainer):
    """Does not shuffle, so that its batches are those of the other sides."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trainer(work: Work, plain: Plain) -> Tensor:
    """A new transformers.Trainer for each client, on one PEFT model that stays in memory."""
    job, x = work.job, work.job.problem.initial()
    collate = DataCollatorWithPadding(job.backbone.tokenizer)

    def client(batches: list[Tensor]) -> Tensor:
        plain.space.scatter(plain.model, x)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, **_settings(work, batches))
            trainer = _InOrder(plain.model, arguments, data_collator=collate, train_dataset=_Rows(work, batches))
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return plain.space.gather(plain.model)

    return mean(client(batches) for batches in work.batches)


def sft_trainer(work: Work, plain: Plain) -> Tensor:
    """A new TRL SFTTrainer for each client, on one PEFT model that stays in memory, with TRL's default loss."""
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    job, x = work.job, work.job.problem.initial()

    class InOrder(SFTTrainer):
        """Does not shuffle, so that its batches are those of the other sides."""

        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    def client(batches: list[Tensor]) -> Tensor:
        plain.space.scatter(plain.model, x)
        with tempfile.TemporaryDirectory() as folder:
            more = {"dataset_kwargs": {"skip_prepare_dataset": True}}
            arguments = SFTConfig(folder, **_settings(work, batches), **more)
            table = Table.from_list(_rows(work, batches))
            trainer = InOrder(plain.model, args=arguments, train_dataset=table, processing_class=job.backbone.tokenizer)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return plain.space.gather(plain.model)

    return mean(client(batches) for batches in work.batches)


def _settings(work: Work, batches: list[Tensor]) -> dict[str, Any]:
    """What both trainers are told."""
    job = work.job
    return {
        "per_device_train_batch_size": len(batches[0]),
        "max_steps": len(batches),
        "learning_rate": LR,
        "weight_decay": job.algorithm.weight_decay,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": job.machine.autocast is torch.bfloat16,
        "use_cpu": job.machine.device.type == "cpu",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


@lru_cache(maxsize=1)
def _resident(recipe: str, overrides: tuple[str, ...], clients: int, steps: int, batch: int) -> tuple[Work, Plain]:
    """Data and model of a Flower actor, read once per process."""
    torch.set_num_threads(1)
    work = Work.of(recipe, [*overrides, "run.threads=1"], clients, steps, batch)
    return work, Plain.of(work.job)


def flower(recipe: str, overrides: Sequence[str], clients: int, steps: int, batch: int, rounds: int) -> list[float]:
    """Seconds of each of `rounds` rounds of FedAvg under Flower's simulation engine, after one warm-up round.

    The clients run `train_client` in actors of one core each. The model stays in each actor's memory.
    """
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    settings = (recipe, tuple(overrides), clients, steps, batch)
    client_app, seconds = ClientApp(), []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        work, plain = _resident(*settings)
        x = next(iter(message.content["arrays"].to_torch_state_dict().values()))
        batches = work.batches[int(context.node_config["partition-id"])]
        arrays = ArrayRecord({"x": train_client(plain, work.job, x, batches)})
        metrics = MetricRecord({"num-examples": 1})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *args: object, **kwargs: object) -> object:
            self.began = time.perf_counter()
            return super().configure_train(*args, **kwargs)

        def aggregate_train(self, *args: object, **kwargs: object) -> object:
            found = super().aggregate_train(*args, **kwargs)
            seconds.append(time.perf_counter() - self.began)
            return found

    def serve(grid: Grid, context: Context) -> None:
        x = _resident(*settings)[0].job.problem.initial()
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=clients, min_train_nodes=clients)
        strategy.start(grid, ArrayRecord({"x": x}), num_rounds=rounds + 1, train_config=ConfigRecord({}))

    server_app = ServerApp()
    server_app.main()(serve)
    run_simulation(server_app, client_app, clients, backend_config={"client_resources": {"num_cpus": 1}})
    return seconds[1:]
