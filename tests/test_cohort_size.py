"""How many clients train together: the rule, the memory it stays within, stepping down, and `fedllm tune`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, load_recipe, run_recipe, simulate, sizing
from fedllm import tune as tuning
from fedllm.assemble import assemble
from fedllm.cli import main
from fedllm.errors import RunError
from fedllm.lora_problem import LoraProblem
from fedllm.memory import Waves, available_memory, out_of_memory
from fedllm.rounds import round_info
from fedllm.sizing import Need, fit, rule
from fedllm.training import Share

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


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def agree(a: Path, b: Path) -> bool:
    """Float32 adapters that differ by rounding only."""
    first, second = adapter(a), adapter(b)
    return all(float((second[name] - v).abs().max()) <= 1e-4 * float(v.abs().max()) for name, v in first.items())


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

    def work(cohort: list[int]) -> int:
        tried.append(cohort)
        if len(cohort) > 3:
            raise MemoryError
        return sum(cohort)

    waves = Waves(range(9), 6)
    assert list(waves.each(work)) == [([0, 1, 2], 3), ([3, 4, 5], 12), ([6, 7, 8], 21)]
    assert tried == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert waves.forced == 3


def test_a_client_that_does_not_fit_alone_is_named() -> None:
    def work(cohort: list[int]) -> None:
        if 7 in cohort:
            fail_for_real()

    with pytest.raises(RunError, match=r"client 7: its step alone does not fit.*can't allocate memory.*run\.slices=4"):
        list(Waves([3, 7], None).each(work))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        list(Waves([1, 2], None).each(lambda cohort: torch.zeros(2) @ torch.zeros(3)))


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


def test_a_run_steps_down_says_so_once_and_records_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory gives out in round 2; rounds, resume and result go on with the smaller cohort, equal up to rounding."""
    steps = ["local={steps: 2, batch_size: 8}"]
    whole = run_recipe(tiny / "recipe.yaml", steps, tmp_path / "whole")
    assert (whole.result["machine"]["cohort"], whole.result["machine"]["stepped_down"]) == (5, [])
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(2, first_round=1))
    capsys.readouterr()
    small = run_recipe(tiny / "recipe.yaml", steps, tmp_path / "small")
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("do not fit into memory") == 1
    assert "round 2: cohorts of 5 do not fit into memory" in said
    machine = small.result["machine"]
    assert (machine["cohort"], machine["stepped_down"]) == (2, [{"round": 2, "cohort": 2}])
    assert agree(whole.folder, small.folder)
    assert small.metrics[3]["train_loss"] == pytest.approx(whole.metrics[3]["train_loss"], rel=1e-4)

    (small.folder / "result.json").unlink()
    shutil.rmtree(small.folder / "checkpoints" / "000004")
    again = run_recipe(tiny / "recipe.yaml", steps, small.folder)
    assert again.result["machine"]["cohort"] == 2
    assert "do not fit" not in capsys.readouterr().out


def test_a_client_too_large_ends_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(0))
    with pytest.raises(RunError, match=r"client \d: its step alone does not fit into memory"):
        run_recipe(tiny / "recipe.yaml", run_dir=tmp_path / "run")


def test_the_choice_is_kept_on_another_machine(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine whose rule says 1, and a recipe that was tuned meanwhile: the run goes on with its 5, bit for bit."""
    whole = run_recipe(tiny / "recipe.yaml", run_dir=tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "000004")
    monkeypatch.setattr(sizing, "rule", lambda *_: 1)
    capsys.readouterr()
    again = run_recipe(tiny / "recipe.yaml", ["run.slices=2"], cut)
    assert again.result["machine"]["cohort"] == 5
    assert "run.slices=2 is for a new run; this one goes on with auto" in capsys.readouterr().out
    first, second = adapter(whole.folder), adapter(cut)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 clients of 100 MiB each: two keep less than 256 MiB. On a GPU the peak may be half of its memory."""
    monkeypatch.setattr(sizing, "total_memory", lambda device: 1200 * 2**20)

    def size(clients: int) -> float:
        return clients * 100 * 2**20

    assert rule(CPU, 10, size, size) == 2
    assert rule(CPU, 2, size, size) == 2
    assert rule(GPU, 10, size, size) == 5
    assert fit(10, size, 0) == 1


def test_a_cohort_too_large_for_memory_is_cut_into_waves(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", ["run.cohort=5"])
    job = assemble(recipe)
    need = Need.of(job.algorithm, job.problem, job.info)
    assert job.cohort == 5
    left = (need.of_cohort(job.problem, 2) + need.of_cohort(job.problem, 5)) / 2 / sizing.USABLE
    monkeypatch.setattr(sizing, "available_memory", lambda device: int(left))
    assert assemble(recipe).cohort == 2
    assert "a cohort of 5 clients needs about" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")  # as many processes share the memory
    assert assemble(recipe).cohort == 1


def test_what_autograd_keeps_grows_with_the_rows(tiny: Path) -> None:
    problem = assemble(load_recipe(tiny / "recipe.yaml")).problem
    one, two, four = (problem.kept_bytes(rows) for rows in (1, 2, 4))
    assert two > one > 0
    assert four - two == pytest.approx(2 * (two - one), rel=0.02)


def test_pass_tokens(tiny: Path) -> None:
    job = assemble(load_recipe(tiny / "recipe.yaml", ["run.slices=1"]))
    parts = [job.problem._batches.indices(client, 0, 0) for client in (0, 1)]
    lengths = job.problem._tokens.lengths
    longest = max(int(lengths[part].max()) for part in parts)
    assert job.problem.pass_tokens([0, 1], 1) == 2 * max(map(len, parts)) * longest


@pytest.fixture
def own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a comment that extends the tiny one, and quick measurements."""
    monkeypatch.setattr(tuning, "REPEATS", 1)
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {tiny / 'recipe.yaml'}\n# my own\nfederation: {{rounds: 2}}\n")
    return path


def test_tune_writes_the_fastest_into_the_recipe_and_changes_no_result(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = own.read_text()
    plain = run_recipe(own, run_dir=tmp_path / "plain")
    fast = {(3, "auto"): 1.0, (3, 4): 0.5}
    monkeypatch.setattr(tuning.Work, "seconds", lambda self, trial: fast.get((trial.cohort, trial.slices), 2.0))
    assert main(["tune", str(own), "--dry-run"]) == 0
    assert own.read_text() == before
    assert "best: run.cohort=3 run.slices=4" in capsys.readouterr().out
    assert main(["tune", str(own)]) == 0
    assert own.read_text() == before + "run:        {cohort: 3, slices: 4}\n"
    tuned = run_recipe(own, run_dir=tmp_path / "tuned")
    assert tuned.result["machine"]["cohort"] == 3
    assert agree(plain.folder, tuned.folder)


def test_tune_measures_and_leaves_out_what_does_not_fit(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(2))
    assert main(["tune", str(own)]) == 0
    said = capsys.readouterr().out
    assert said.count("does not fit") == 2  # 3 and 5
    assert yaml.safe_load(own.read_text())["run"]["cohort"] in (1, 2)
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", crowded(0))
    assert main(["tune", str(own)]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.cohort=3"], "run.cohort: is what tune chooses"),
        (["federation={rounds: 1, clients_per_round: 1}", "local={batch_size: 1}"], "nothing to tune"),
    ],
)
def test_what_cannot_be_tuned(own: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(own), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_runs_own_recipe_and_one_in_an_unsafe_form_are_refused(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = own.read_text()
    own.write_text(plain + "partition: &shared {seed: 1}\nrun: *shared\n")
    assert main(["tune", str(own)]) == 2
    assert "cannot be changed safely" in capsys.readouterr().err
    own.write_text(plain)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", str(own)]) == 2
    assert "start it without a launcher" in capsys.readouterr().err
    monkeypatch.undo()
    (own.parent / "metrics.jsonl").write_text(json.dumps({}))
    assert main(["tune", str(own)]) == 2
    assert "is the record of a run" in capsys.readouterr().err


def test_what_one_process_came_down_to_reaches_the_others() -> None:
    problem = QuadraticProblem.random(4, 3)
    alg = load_algorithm("fedavg", lr=0.01)
    info = round_info(alg, problem, rounds=1, sampled=2, tracked=None, local_steps=1)
    share, other, total = (Share.empty(alg, problem.initial(), info) for _ in range(3))
    share.forced = 2
    head, tensors = share.pack()
    total.join(other.unpack(json.loads(json.dumps(head)), tensors))
    assert total.forced == 2
