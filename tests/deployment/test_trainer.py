"""FederatedTrainer: the algorithm's steps in transformers' training loop, equal to Client.fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import launch
from repository import REPO
from torch.optim import SGD
from trained_rounds import MODELS, STEPS, arguments, assert_same, causal, classifier, round_of, rows, trained
from transformers import Trainer, TrainerCallback, default_data_collator

import fedllm.client
from fedllm import load_algorithm
from fedllm.client import FederatedTrainer, Upload
from fedllm.common.errors import UserError

KINDS = list(MODELS)


def fitted(kind: str, size: int, name: str = "fadamgc", steps: int = STEPS) -> Upload:
    """Client.fit over batches of `size` rows in order."""
    client, broadcast = round_of(kind, name)
    client.model.train()
    all_rows = rows(kind)
    batches = [default_data_collator(all_rows[start : start + size]) for start in range(0, steps * size, size)]
    return client.fit(broadcast, batches)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("classifier", "fadamgc"),
        pytest.param("classifier", "scaffold", marks=pytest.mark.slow),
        ("causal", "fedadamw"),
        pytest.param("causal", "fedavg", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_round_is_that_of_client_fit(kind: str, name: str, tmp_path: Path) -> None:
    assert_same(trained(kind, arguments(tmp_path), name=name), fitted(kind, 4, name), 1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_accumulated_batches_are_one_larger_batch(kind: str, tmp_path: Path) -> None:
    """The samples learn different numbers of tokens, and the last step has two batches instead of three. With FedAvg,
    whose steps are as long as the gradient."""
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=3)
    assert_same(trained(kind, args, name="fedavg"), fitted(kind, 6, "fedavg", steps=3), 1e-6)


@pytest.mark.slow
def test_a_trainer_alone_would_weigh_them_otherwise(tmp_path: Path) -> None:
    """Why compute_loss is ours: a BERT takes num_items_in_batch and ignores it, so that the gradient is three times as
    large. Once this fails, transformers does it."""
    gradients = []
    for size, accumulated in ((6, 1), (2, 3)):
        seen = Seen()
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated, "max_steps": 1}
        args = arguments(tmp_path, **sizes, max_grad_norm=0.0)
        model = classifier()
        Trainer(
            model, args, default_data_collator, rows("classifier"), callbacks=[seen], optimizers=(sgd(model), None)
        ).train()
        gradients.append(seen.norm)
    assert gradients[1] == pytest.approx(3 * gradients[0], rel=0.1)


def sgd(model: Any) -> SGD:
    return SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)


class Seen(TrainerCallback):
    """Notes the events and the gradient's norm; fails at the end of a step if told."""

    def __init__(self, fails_at: int = 0) -> None:
        self.events: list[str] = []
        self.norm, self.fails_at = 0.0, fails_at

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.events.append("train begins")

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        squares = [each.grad.square().sum() for each in model.parameters() if each.grad is not None]
        self.norm = float(torch.stack(squares).sum().sqrt())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step}")
        if state.global_step == self.fails_at:
            raise KeyboardInterrupt

    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        assert metrics["eval_loss"] > 0
        self.events.append("evaluated")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.events.append("train ends")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_are_called_and_an_evaluation_changes_nothing(kind: str, tmp_path: Path) -> None:
    seen = Seen()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    found = trained(kind, args, callbacks=[seen], eval_dataset=rows(kind, 5))
    assert seen.events == [
        "train begins", "step 1", "step 2", "evaluated", "step 3", "step 4", "evaluated", "train ends",
    ]  # fmt: skip
    assert_same(found, fitted(kind, 4), 1e-7)


def test_a_callback_may_end_a_round_early(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    assert_same(trained("classifier", arguments(tmp_path), callbacks=[Stop()]), fitted("classifier", 4, steps=2), 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_round_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """With dropout, an order drawn at random, and another client as after a restart."""
    model = {"dropout": 0.2} if kind == "classifier" else {}
    kept = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    expected = trained(kind, arguments(tmp_path / "whole", **kept), model=model)
    args = arguments(tmp_path / "cut", **kept)
    with pytest.raises(KeyboardInterrupt):
        trained(kind, args, model=model, callbacks=[Seen(fails_at=3)])
    client, broadcast = round_of(kind, **model)
    again = FederatedTrainer(client, broadcast, args, train_dataset=rows(kind), data_collator=default_data_collator)
    assert_same(again.fit(resume_from_checkpoint=True), expected, 0)


@pytest.mark.slow
def test_a_checkpoint_of_another_round_or_without_it_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trained("classifier", args)
    client, broadcast = round_of("classifier", round=1)
    given = {"train_dataset": rows("classifier"), "data_collator": default_data_collator}
    with pytest.raises(UserError, match="optimizer state: found round 0, expected 1, the broadcast's; start the round"):
        FederatedTrainer(client, broadcast, args, **given).fit(str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"checkpoint-4: found no optimizer.pt, which holds the unfinished round"):
        FederatedTrainer(client, broadcast, args, **given).fit(resume_from_checkpoint=True)


def test_each_round_has_an_order_of_its_own(tmp_path: Path) -> None:
    def first(round: int) -> Any:
        client, broadcast = round_of("classifier", round=round)
        args = arguments(tmp_path, train_sampling_strategy="random")
        trainer = FederatedTrainer(client, broadcast, args, train_dataset=rows("classifier", 12))
        assert (args.seed, args.max_grad_norm) == (42, 1.0), "the caller's arguments stay as they are"
        return next(iter(trainer.get_train_dataloader()))["input_ids"]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


@pytest.mark.slow
def test_epochs_make_the_steps_and_a_round_may_be_trained_again(tmp_path: Path) -> None:
    client, broadcast = round_of("classifier")
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=1)
    trainer = FederatedTrainer(client, broadcast, args, train_dataset=rows("classifier", 10))
    with pytest.raises(UserError, match=r"the round has not been trained; call train\(\) before finish\(\)"):
        trainer.finish()
    first, second = trainer.fit(), trainer.fit()
    assert first.steps == 3
    assert_same(second, first, 1e-7)
    args.num_train_epochs = 2
    with pytest.raises(UserError, match=r"args.max_steps: .* make 6 steps, expected at most 4, .*; set max_steps=4"):
        FederatedTrainer(client, broadcast, args, train_dataset=rows("classifier", 10)).train()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_sends_float32(kind: str, tmp_path: Path) -> None:
    found = trained(kind, arguments(tmp_path, bf16=True), name="fedavg")
    expected = fitted(kind, 4, "fedavg")
    assert found["d"].dtype == torch.float32
    torch.testing.assert_close(found["d"], expected["d"], rtol=0.1, atol=2e-3)
    assert not torch.equal(found["d"], expected["d"])


def shape(**values: Any) -> Any:
    """Arguments as a callable, since some values cannot be given to TrainingArguments without a package or launcher."""

    def changed(folder: Path) -> Any:
        args = arguments(folder)
        for name, value in values.items():
            setattr(args, name, value)
        return args

    return changed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (shape(lr_scheduler_type="cosine"), r"lr_scheduler_type: found cosine, expected constant: .* `schedule`"),
        (shape(max_grad_norm=0.5), r"max_grad_norm: found 0.5, expected 0.0: .* `clip_norm`"),
        (shape(optim="sgd"), "optim: found sgd, expected none of your own: leave it out; the algorithm is the optimiz"),
        (shape(learning_rate=1e-3), "learning_rate: found 0.001, expected none of your own: leave it out"),
        (shape(weight_decay=0.1), "weight_decay: found 0.1"),
        (shape(adam_beta1=0.8), "adam_beta1: found 0.8"),
        (shape(warmup_steps=10), "warmup_steps: found 10"),
        (shape(load_best_model_at_end=True), "load_best_model_at_end: found True, .*: the upload is what"),
        (shape(auto_find_batch_size=True), "auto_find_batch_size: found True, .*per_device_train_batch_size"),
        (shape(deepspeed="ds.json"), "deepspeed: found ds.json, .*several GPUs work with torchrun alone"),
        (shape(fsdp="full_shard"), "fsdp: found full_shard, .*several GPUs work with torchrun alone"),
    ],
)
def test_arguments_that_contradict_the_algorithm_are_named(args: Any, message: str, tmp_path: Path) -> None:
    client, broadcast = round_of("classifier")
    before = [each.clone() for each in client.model.parameters()]
    with pytest.raises(UserError, match=f"^args.{message}"):
        FederatedTrainer(client, broadcast, args(tmp_path), train_dataset=rows("classifier"))
    assert all(torch.equal(now, then) for now, then in zip(client.model.parameters(), before, strict=True))


def test_what_a_client_has_itself_is_not_given_again(tmp_path: Path) -> None:
    client, broadcast = round_of("classifier")
    for given, message in (
        ({"model": causal()}, "model: found another than client.model, expected that one, or none"),
        ({"model_init": causal}, "model_init: found one, expected none: the model is client.model"),
        ({"optimizers": (sgd(client.model), None)}, "optimizers: found one, expected none: the algorithm is"),
        ({"optimizer_cls_and_kwargs": (SGD, {})}, "optimizer_cls_and_kwargs: found one, expected none: the alg"),
    ):
        with pytest.raises(UserError, match=message):
            FederatedTrainer(client, broadcast, arguments(tmp_path), **given)
    FederatedTrainer(client, broadcast, arguments(tmp_path), model=client.model)


def test_an_algorithm_that_reads_the_loss_is_refused(tmp_path: Path) -> None:
    client, broadcast = round_of("classifier")
    client.algorithm = load_algorithm("qfedavg")
    with pytest.raises(UserError, match=r"client.algorithm: found QFedAvg, which reads the loss .* use Client.fit"):
        FederatedTrainer(client, broadcast, arguments(tmp_path))


def test_sharding_by_the_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's settings, which are no argument, make these flags."""
    client, broadcast = round_of("classifier")

    def sharded(self: Any) -> None:
        real(self)
        self.is_fsdp_enabled = True

    real = Trainer.create_accelerator_and_postprocess
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", sharded)
    with pytest.raises(UserError, match="fsdp: found it in accelerate's settings, expected none"):
        FederatedTrainer(client, broadcast, arguments(tmp_path))


def test_a_model_on_several_devices_of_one_process_is_refused(tmp_path: Path) -> None:
    client, broadcast = round_of("causal")
    client.model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(UserError, match=r"model: found it on several GPUs of one process .*torchrun"):
        FederatedTrainer(client, broadcast, arguments(tmp_path))


def test_a_dataset_without_labels_is_averaged_over_batches(tmp_path: Path) -> None:
    """The loss is then the model's own, of what it calls otherwise."""

    class Own(FederatedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
            assert "target" in inputs
            loss = torch.nn.functional.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["target"])
            return (loss, SimpleNamespace()) if return_outputs else loss

    client, broadcast = round_of("classifier")
    renamed = [{"input_ids": row["input_ids"], "target": row["labels"]} for row in rows("classifier", 12)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
    args = arguments(tmp_path, **sizes, remove_unused_columns=False)
    found = Own(client, broadcast, args, train_dataset=renamed).fit()
    assert_same(found, fitted("classifier", 6, steps=2), 1e-6)


@pytest.mark.slow
def test_two_processes_are_one_with_larger_batches(tmp_path: Path) -> None:
    ended = launch(str(REPO / "tests" / "support" / "trained_rounds.py"), str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    for kind in KINDS:
        files = [tmp_path / f"{kind}-{rank}.safetensors" for rank in range(2)]
        first, second = (Upload.from_bytes(file.read_bytes()) for file in files)
        assert_same(first, fitted(kind, 4, "fedavg"), 1e-6)
        assert_same(second, first, 0)


@pytest.mark.slow
def test_the_client_is_imported_without_the_trainer() -> None:
    code = (
        "import sys, fedllm.client as c; assert 'transformers.trainer' not in sys.modules; "
        "assert c.FederatedTrainer.__name__ == 'FederatedTrainer'; assert 'transformers.trainer' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, timeout=120)
    with pytest.raises(AttributeError, match=r"module 'fedllm.client' has no attribute 'Trainer'"):
        _ = fedllm.client.Trainer
