"""How many clients train together: the rule, the memory it stays within, stepping down, and `fedllm tune`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapters import assert_close, same_bits
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, load_recipe, run_recipe, simulate
from fedllm.cli.commands import main
from fedllm.common.errors import RunError
from fedllm.common.memory import HalvingBatches, available_memory, out_of_memory
from fedllm.experiment import memory_plan as sizing
from fedllm.experiment import tune as tuning
from fedllm.experiment.build import Job, assemble
from fedllm.experiment.memory_plan import (
    CPU_PASS,
    Need,
    choose_stacked_clients,
    fit,
    least_tokens,
    pass_bytes,
    usable_memory,
)
from fedllm.federation.info import round_info
from fedllm.federation.local_training import client_too_large
from fedllm.federation.partial_round import PartialRound
from fedllm.federation.setup import Setup
from fedllm.problems.lora.evaluation_batches import evaluation_batches
from fedllm.problems.lora.padded_rows import PaddedRows
from fedllm.problems.lora.problem import LoraProblem
from fedllm.problems.lora.stacked_model import StackedModel

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = LoraProblem.loss_and_gradient


def fail_for_real() -> None:
    """torch's own error, from an allocation that no machine grants."""
    torch.empty(2**46, dtype=torch.float64)


def crowded(most: int, first_round: int = 0):
    """A loss_and_gradient in which more than `most` clients do not fit into memory, after a first step that does."""

    def gradient(self: LoraProblem, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        if len(clients) > most and round >= first_round and step == 1:
            fail_for_real()
        return PLAIN(self, X, clients, round, step)

    return gradient


def assembled(tiny: Path, *overrides: str) -> Job:
    return assemble(load_recipe(tiny / "recipe.yaml", overrides))


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as found:
        fail_for_real()
    assert out_of_memory(found.value)
    assert out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shapes do not match"))
    assert 0 < available_memory(CPU) < 2**50


def test_waves_do_the_same_clients_again_in_halves_and_stay_small() -> None:
    tried: list[list[int]] = []

    def work(batch: list[int]) -> int:
        tried.append(batch)
        if len(batch) > 3:
            raise MemoryError
        return sum(batch)

    batches = HalvingBatches(range(9), 6, client_too_large)
    assert list(batches.each(work)) == [([0, 1, 2], 3), ([3, 4, 5], 12), ([6, 7, 8], 21)]
    assert tried == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches.forced == 3


def test_a_client_that_does_not_fit_alone_is_named() -> None:
    def work(batch: list[int]) -> None:
        if 7 in batch:
            fail_for_real()

    with pytest.raises(RunError, match=r"client 7: its step alone does not fit.*run\.slices=4.*can't allocate memory"):
        list(HalvingBatches([3, 7], None, client_too_large).each(work))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        list(HalvingBatches([1, 2], None, client_too_large).each(lambda batch: torch.zeros(2) @ torch.zeros(3)))


def test_full_gradients_step_down_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = QuadraticProblem.random(6, 4)
    alg = load_algorithm("fadamgc", lr=0.01, tracking_init="gradient")
    whole = simulate(alg, problem, rounds=2, local_steps=2, clients_per_round=3).x
    plain = QuadraticProblem.full_gradient

    def full(self: QuadraticProblem, x: Tensor, clients: Sequence[int]) -> Tensor:
        if len(clients) > 2:
            fail_for_real()
        return plain(self, x, clients)

    monkeypatch.setattr(QuadraticProblem, "full_gradient", full)
    torch.testing.assert_close(simulate(alg, problem, rounds=2, local_steps=2, clients_per_round=3).x, whole)


@pytest.mark.slow
def test_a_run_steps_down_says_so_once_and_records_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory gives out in round 2; the run goes on with fewer clients together, equal up to rounding."""
    steps = ["local={steps: 2, batch_size: 8}"]
    whole = run_recipe(tiny / "recipe.yaml", steps, tmp_path / "whole")
    assert (whole.result["machine"]["stacked_clients"], whole.result["machine"]["stepped_down"]) == (5, [])
    assert whole.result["machine"]["pass_tokens"] == int(CPU_PASS / assembled(tiny, *steps).problem.token_bytes)
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(2, first_round=1))
    capsys.readouterr()
    small = run_recipe(tiny / "recipe.yaml", steps, tmp_path / "small")
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("do not fit into memory") == 1
    assert "round 2: 5 clients together do not fit into memory" in said
    machine = small.result["machine"]
    assert (machine["stacked_clients"], machine["stepped_down"]) == (2, [{"round": 2, "stacked_clients": 2}])
    assert_close(small.folder, whole.folder)
    assert small.metrics[3]["train_loss"] == pytest.approx(whole.metrics[3]["train_loss"], rel=1e-4)

    (small.folder / "result.json").unlink()
    shutil.rmtree(small.folder / "checkpoints" / "000004")
    again = run_recipe(tiny / "recipe.yaml", steps, small.folder)
    assert again.result["machine"]["stacked_clients"] == 2
    assert "do not fit" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_client_too_large_ends_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(0))
    with pytest.raises(RunError, match=r"client \d: its step alone does not fit into memory"):
        run_recipe(tiny / "recipe.yaml", run_dir=tmp_path / "run")


@pytest.mark.slow
def test_the_choice_is_kept_on_another_machine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine whose rule says 1, and a recipe that was tuned meanwhile: the run goes on with its 5, bit for bit."""
    whole = run_recipe(tiny / "recipe.yaml", run_dir=tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "000004")
    monkeypatch.setattr(sizing, "total_memory", lambda device: 0)
    capsys.readouterr()
    assert assembled(tiny).stacked_clients == 1
    again = run_recipe(tiny / "recipe.yaml", ["run.slices=2"], cut)
    assert again.result["machine"]["stacked_clients"] == 5
    assert "run.slices=2 is for a new run; this one goes on with auto" in capsys.readouterr().out
    assert same_bits(whole.folder, cut)


def test_the_rule_is_memory_alone_and_not_what_is_free_of_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All five clients of a round, halved until the estimate is half of the memory that there is."""
    job = assembled(tiny)
    need = Need.of(job.algorithm, job.problem)

    def chosen(total: float) -> int:
        monkeypatch.setattr(sizing, "total_memory", lambda device: total)
        return choose_stacked_clients("auto", job.algorithm, job.problem, job.info, CPU)

    five, two, one = (need.of_clients(job.problem, size) for size in (5, 2, 1))
    assert five > two > one
    assert [chosen(2.0 * most) for most in (five, five - 1, two, two - 1, 0)] == [5, 2, 2, 1, 1]
    assert "are trained together" not in capsys.readouterr().out
    assert fit(10, lambda size: 100 * size, 0) == 1


def test_the_bound_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "total_memory", lambda device: 80 * 2**30)
    assert pass_bytes(CPU) == CPU_PASS
    assert pass_bytes(GPU) == 20 * 2**30
    machines = [(CPU, torch.bfloat16), (CPU, None), (GPU, torch.bfloat16)]
    assert [least_tokens(*machine) for machine in machines] == [768, 0, 0]


@pytest.mark.parametrize(("slices", "packed"), [("auto", True), ("auto", False), ("1", False), ("2", False)])
def test_passes_keep_within_their_bound(tiny: Path, slices: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of each pass, counted as it goes; in packed rows, padded ones, and best and equal slices of these."""
    problem = assembled(tiny, f"run.slices={slices}").problem
    if problem.packed and not packed:
        problem.rows = PaddedRows(problem.model, problem.rows.tokens, problem.rows.pad_id)
    assert problem.packed == packed
    clients = list(range(8))
    sizes = problem.rows.sizes([problem.batches.indices(client, 0, 0) for client in clients])
    most = 2.5 * max(sizes)
    problem.passes.tokens = most
    passes = list(problem.passes.cut(sizes))
    assert [client for some in passes for client in clients[some]] == clients
    assert 1 < len(passes) < 8
    assert most / 4 < problem.largest_pass(clients, 1) <= most
    seen: list[int] = []
    run = StackedModel._run

    def counted(self: StackedModel, wanted: Any, inputs: dict[str, Tensor] | None = None) -> Tensor:
        tokens = inputs["input_ids"].numel() if inputs else wanted.packed.sample.numel()
        seen.append(tokens)
        return run(self, wanted, inputs)

    monkeypatch.setattr(StackedModel, "_run", counted)
    problem.gradient(problem.initial().repeat(8, 1), clients, 0, 0)
    assert len(seen) == len(passes) * int(slices) if slices != "auto" else len(seen) >= len(passes)
    room = 1.2 if packed else 1.0  # packed rows have a little more padding than is counted
    assert max(seen) <= room * problem.largest_pass(clients, 1)
    problem.passes.tokens = 1
    assert [some.stop - some.start for some in problem.passes.cut(sizes)] == [1] * 8


def test_evaluation_counts_where_it_is_the_largest(tiny: Path) -> None:
    need = Need(fixed=100, token=10, client=1000, evaluation=5000)
    assert need.bytes(2, 40) == need.bytes(2, 490) == need.bytes(2, 0)
    assert need.bytes(2, 500) - need.bytes(2, 490) == round(sizing.WORKING * 100)
    job = assembled(tiny)
    assert Need.of(job.algorithm, job.problem).evaluation == pytest.approx(CPU_PASS / 2)  # of two layers


def test_too_many_clients_for_memory_are_trained_in_smaller_numbers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", ["run.cohort=5"])
    job = assemble(recipe)
    need = Need.of(job.algorithm, job.problem)
    assert job.stacked_clients == 5
    left = (need.of_clients(job.problem, 2) + need.of_clients(job.problem, 5)) / 2 / sizing.USABLE
    assert usable_memory(CPU) > need.of_clients(job.problem, 5)
    monkeypatch.setattr(sizing, "available_memory", lambda device: int(left))
    assert assemble(recipe).stacked_clients == 2
    assert "5 clients together need about" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")  # as many processes share the memory
    assert assemble(recipe).stacked_clients == 1


@pytest.mark.parametrize(("processes", "gpus", "sharing"), [(1, 1, 1), (8, 8, 1), (4, 1, 4), (5, 2, 3)])
def test_a_gpus_memory_is_divided_among_the_processes_that_share_it(
    monkeypatch: pytest.MonkeyPatch, processes: int, gpus: int, sharing: int
) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert usable_memory(GPU) == pytest.approx(sizing.USABLE * 2**30 / sharing)


def short_of_memory(most: int):
    """A StackedModel's pass in which more than `most` tokens of an evaluation batch do not fit."""
    plain = StackedModel._run

    def run(self: StackedModel, wanted: Any, inputs: dict[str, Tensor]) -> Tensor:
        if not torch.is_grad_enabled() and inputs["input_ids"].numel() > most:
            fail_for_real()
        return plain(self, wanted, inputs)

    return run


@pytest.mark.slow
def test_evaluation_steps_down(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 samples of 3 to 11 words: batches of 240 tokens, of which 60 at most fit."""
    job = assembled(tiny)
    problem, x = job.problem, job.problem.initial()
    problem.passes.tokens = 240
    whole = problem.outputs(x, job.validation)
    assert 1 < len(evaluation_batches(job.validation.lengths.numpy(), 240)) < 10
    monkeypatch.setattr(StackedModel, "_run", short_of_memory(60))
    for _ in range(2):
        torch.testing.assert_close(problem.outputs(x, job.validation), whole, rtol=1e-4, atol=1e-6)
        assert problem.eval_cuts == 5
    longest = int(job.validation.lengths.max())
    monkeypatch.setattr(StackedModel, "_run", short_of_memory(longest - 1))
    with pytest.raises(RunError, match=rf"a sample of {longest} tokens alone does not fit.*lower data\.max_length"):
        problem.outputs(x, job.validation)


@pytest.mark.slow
def test_a_run_says_once_that_evaluation_stepped_down_and_records_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 40 samples are one batch, of which a third fits; a run that is resumed does not try the whole one again."""
    folder, longest = tmp_path / "run", int(assembled(tiny).validation.lengths.max())
    monkeypatch.setattr(StackedModel, "_run", short_of_memory(14 * longest))
    found = run_recipe(tiny / "recipe.yaml", [], folder).result
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("do not fit into memory") == 1
    assert "round 1: the batches of the evaluation do not fit into memory; they are cut into 4 from here on" in said
    assert found["machine"]["stepped_down"] == [{"round": 1, "eval_cuts": 4}]

    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "000004")
    again = run_recipe(tiny / "recipe.yaml", [], folder).result
    assert (again["final"], again["machine"]["stepped_down"]) == (found["final"], found["machine"]["stepped_down"])
    assert "do not fit" not in capsys.readouterr().out


@pytest.fixture
def own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a comment that extends the tiny one, and quick measurements."""
    monkeypatch.setattr(tuning, "REPEATS", 1)
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {tiny / 'recipe.yaml'}\n# my own\nfederation: {{rounds: 2}}\n")
    return path


@pytest.mark.slow
def test_tune_writes_the_fastest_into_the_recipe_and_changes_no_result(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = own.read_text()
    plain = run_recipe(own, run_dir=tmp_path / "plain")
    fast = {(3, "auto"): 1.0, (3, 4): 0.5}
    monkeypatch.setattr(
        tuning.Work, "seconds", lambda self, trial: fast.get((trial.stacked_clients, trial.slices), 2.0)
    )
    assert main(["tune", str(own), "--dry-run"]) == 0
    assert own.read_text() == before
    said = capsys.readouterr().out
    assert "best: run.stacked_clients=3 run.slices=4" in said
    assert [said.count(rows) for rows in (" packed ", " padded, 1 slice ", " padded, 4 slices ")] == [5, 1, 1]
    assert main(["tune", str(own)]) == 0
    assert own.read_text() == before + "run:        {stacked_clients: 3, slices: 4}\n"
    own.write_text(before + "run: {cohort: 1}\n")
    assert main(["tune", str(own)]) == 0
    assert own.read_text() == before + "run: {slices: 4, cohort: 3}\n", "the name that the recipe has stays"
    tuned = run_recipe(own, run_dir=tmp_path / "tuned")
    assert tuned.result["machine"]["stacked_clients"] == 3
    assert_close(tuned.folder, plain.folder)


@pytest.mark.slow
def test_tune_of_all_weights_chooses_the_number_of_clients_alone(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = own.read_text() + "lora: null\nmodel: {dropout: 0.0}\n"
    own.write_text(before)
    one = run_recipe(own, run_dir=tmp_path / "one")
    plain, tried = tuning.Work.seconds, []

    def seconds(self: Any, trial: tuning.Trial) -> float | None:
        found = plain(self, trial)
        tried.append((trial.stacked_clients, self.job.problem.stacked, found is not None and found > 0))
        return 0.5 if trial.stacked_clients == 3 else 1.0

    monkeypatch.setattr(tuning.Work, "seconds", seconds)
    assert main(["tune", str(own)]) == 0
    assert set(tried) == {(1, False, True), (2, True, True), (3, True, True), (5, True, True)}
    assert own.read_text() == before + "run:        {stacked_clients: 3}\n"
    assert "packed" not in capsys.readouterr().out
    assert run_recipe(own, run_dir=tmp_path / "tuned").result["final"] == pytest.approx(one.result["final"], rel=1e-4)


@pytest.mark.slow
def test_tune_measures_and_leaves_out_what_does_not_fit(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(2))
    assert main(["tune", str(own)]) == 0
    said = capsys.readouterr().out
    assert said.count("too large") == 2  # 3 and 5
    assert yaml.safe_load(own.read_text())["run"]["stacked_clients"] in (1, 2)
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(0))
    assert main(["tune", str(own)]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.cohort=3"], "run.cohort: is what tune chooses"),
        (["run.stacked_clients=3"], "run.stacked_clients: is what tune chooses"),
        (["federation={rounds: 1, clients_per_round: 1}", "local={batch_size: 1}"], "nothing to tune"),
        (
            ["federation={rounds: 1, clients_per_round: 1}", "lora=null"],
            "with all weights trained (lora: null) can be cut",
        ),
        (
            ["lora=null", "model.dropout=0.5"],
            "nothing to tune: BertForSequenceClassification cannot train stacked clients",
        ),
    ],
)
def test_what_cannot_be_tuned(own: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(own), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_runs_own_recipe_and_one_in_an_unsafe_form_are_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = own.read_text()
    own.write_text(plain + "partition: &shared {seed: 1}\nrun: *shared\n")
    assert main(["tune", str(own)]) == 2
    assert "cannot be changed safely" in capsys.readouterr().err
    own.write_text(plain)
    (own.parent / "metrics.jsonl").write_text(json.dumps({}))
    assert main(["tune", str(own)]) == 2
    assert "is the record of a run" in capsys.readouterr().err


def test_the_best_cannot_be_written_into_a_pipe(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    reading, writing = os.pipe()
    os.write(writing, own.read_bytes())
    os.close(writing)
    try:
        assert main(["tune", f"/dev/fd/{reading}"]) == 2
    finally:
        os.close(reading)
    assert "is no recipe file that can be written to; --dry-run shows the best settings" in capsys.readouterr().err


def test_what_one_process_came_down_to_reaches_the_others() -> None:
    problem = QuadraticProblem.random(4, 3)
    alg = load_algorithm("fedavg", lr=0.01)
    setup = Setup(alg, problem, round_info(alg, problem, rounds=1, sampled=2, tracked=None, local_steps=1))
    parts = [PartialRound.empty(setup, problem.initial()) for _ in range(2)]
    parts[1].forced = 2
    whole = PartialRound.empty(setup, problem.initial())
    for part in parts:
        whole.add(json.loads(json.dumps(part.note())))
    assert whole.forced == 2
