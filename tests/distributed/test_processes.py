"""Several processes: the bits of one, state that follows its client, failures that are named, runs that heal.

Most launches are forks of one process (tests/support/forked.py). torchrun itself starts those whose subject it is, and
a plain run, which has the bits of the same run by forks.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from adapters import assert_close, same_bits
from launched import launch, numbers, torchrun
from safetensors.torch import load_file

from fedllm import QuadraticProblem, load_algorithm, run_recipe
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import deal, sample
from fedllm.federation.setup import Setup

OVERRIDES = ["algorithm.tracking_init=gradient"]


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, with the two shares that two processes would have."""
    return run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], tmp_path_factory.mktemp("one") / "run").folder


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tiny: Path, tmp_path: Path, one: Path) -> None:
    """FAdamGC over four rounds, its start from full gradients included; state, metrics and evaluation too. Then one
    process goes on from a checkpoint of two."""
    folder = tmp_path / "two"
    done = torchrun("scripts/fedtune.py", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES, "--profile")
    assert done.returncode == 0, done.stderr
    assert same_bits(folder, one)
    assert "where the time of 4 rounds went of process 0 of 2, cpu" in done.stdout
    assert all(line["wait"] > 0.0 for line in json.loads((folder / "profile.json").read_text())["rounds"])
    assert numbers(folder) == numbers(one)
    kept = sorted((one / "checkpoints" / "000004" / "clients").iterdir())
    assert kept
    for path in kept:
        ours, theirs = load_file(path), load_file(folder / "checkpoints" / "000004" / "clients" / path.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert done.stdout.count("round 4/4") == 1
    result = json.loads((folder / "result.json").read_text())
    assert (result["machine"]["processes"], result["machine"]["shares"]) == (2, 2)

    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "000004")
    run_recipe(tiny / "recipe.yaml", OVERRIDES, folder)
    assert same_bits(folder, one)
    assert numbers(folder) == numbers(one)


@pytest.mark.slow
def test_a_sweep_on_two_machines_gives_the_bits_of_one_process(tiny: Path, tmp_path: Path, one: Path) -> None:
    """A process on each, in folders of their own; only the first one writes. test_two_hosts has torchrun on each."""
    (tmp_path / "grid.yaml").write_text("grid: {algorithm.lr: [0.01, 0.02]}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["-m", "fedllm", "sweep", str(tiny / "recipe.yaml"), str(tmp_path / "grid.yaml"), *OVERRIDES]
    done = launch(*words, machines=[tmp_path, elsewhere])
    assert done.returncode == 0, done.stderr
    runs = tmp_path / "runs" / "recipe-grid"
    assert same_bits(runs / "lr=0.01-s0", one)
    assert numbers(runs / "lr=0.01-s0") == numbers(one)
    assert not same_bits(runs / "lr=0.02-s0", one)
    assert (runs / "report" / "report.html").is_file()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_goes_on_later(tiny: Path, tmp_path: Path, one: Path) -> None:
    folder = tmp_path / "killed"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    done = launch("tests/support/poisoned.py", *words, fault="1:3:kill")
    assert done.returncode != 0
    assert "process 1 ended without a word" in done.stderr
    assert "while training in round 3: clients " in done.stderr
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["000001", "000002"]
    run_recipe(tiny / "recipe.yaml", OVERRIDES, folder)
    assert same_bits(folder, one)


@pytest.mark.slow
def test_a_clients_failure_in_another_process_is_named(tiny: Path, tmp_path: Path) -> None:
    """A client of process 1 sends nan in round 1 and is rejected; in round 2 one raises, which ends the run."""
    folder = tmp_path / "failing"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    done = launch("tests/support/poisoned.py", *words, fault="1:1:nan 1:2:raise")
    assert done.returncode != 0
    first = numbers(folder)[0]
    (client,) = first["rejected"]
    assert f"client {client} rejected" in done.stdout
    assert "process 1 failed while training in round 2: clients " in done.stderr
    assert "a fault of the test's own making" in done.stderr
    assert "Round 2, while these clients trained together: " in done.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]


@pytest.mark.slow
def test_memory_that_gives_out_in_one_process_counts_for_all(tiny: Path, tmp_path: Path) -> None:
    """Four clients each; from round 2 on process 1 has room for two, in its forward pass, and says so by torch's own
    error. Process 0, which has room, goes on with two from round 3 on; the result is that of one process. Evaluation,
    of 40 samples, has room for ten there."""
    more = ["federation={rounds: 3, clients_per_round: 8, tracked_per_round: null}"]
    folder = tmp_path / "crowded"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES, *more]
    done = launch("tests/support/poisoned.py", *words, fault="1:2:full")
    assert done.returncode == 0, done.stderr
    cohorts = {
        (rank, round): [int(size) for size in re.findall(rf"rank {rank}, round {round}: (\d) clients", done.stdout)]
        for rank in (0, 1)
        for round in (1, 2, 3)
    }
    assert cohorts == {(0, 1): [4], (1, 1): [4], (0, 2): [4], (1, 2): [4, 2, 2], (0, 3): [2, 2], (1, 3): [2, 2]}
    said = " ".join(done.stdout.split())
    assert said.count("do not fit into memory") == 2
    assert "round 2: the batches of the evaluation do not fit into memory; they are cut into 4 from here on" in said
    assert "round 2: 8 clients together do not fit into memory; that round was done with 2 together" in said
    machine = json.loads((folder / "result.json").read_text())["machine"]
    assert machine["stacked_clients"] == 2
    assert machine["stepped_down"] == [{"round": 2, "stacked_clients": 2}, {"round": 2, "eval_cuts": 4}]

    alone = run_recipe(tiny / "recipe.yaml", [*OVERRIDES, *more], tmp_path / "alone")
    assert (alone.result["machine"]["stacked_clients"], alone.result["machine"]["stepped_down"]) == (8, [])
    assert_close(folder, alone.folder)
    ours = [line["train_loss"] for line in numbers(folder)]
    assert ours == pytest.approx([line["train_loss"] for line in alone.metrics], rel=1e-4)


@pytest.mark.slow
def test_a_users_mistake_is_told_once(tiny: Path) -> None:
    done = torchrun("scripts/fedtune.py", str(tiny / "recipe.yaml"), "algorithm.lr=-1")
    assert done.returncode != 0
    assert done.stderr.count("fedllm: ") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize("words", [["run", "missing.yaml"], ["run", "recipe.yaml", "--profle"]])
@pytest.mark.parametrize("late", ["0", "1"])
@pytest.mark.slow
def test_a_mistake_is_told_once_whichever_process_is_first(words: list[str], late: str, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys, time\n"
        "from fedllm.cli.commands import main\n"
        f"time.sleep(2.0 * (os.environ['LOCAL_RANK'] == '{late}'))\n"
        f"sys.exit(main({words!r}))\n"
    )
    done = torchrun(str(script))
    assert done.returncode != 0
    assert done.stderr.count(words[-1]) == 1


@pytest.mark.slow
def test_a_mistake_of_one_process_alone_is_told(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, sys, time\n"
        "from fedllm.cli.commands import main\n"
        "if os.environ['LOCAL_RANK'] == '0':\n"
        "    time.sleep(30)\n"
        "sys.exit(main(['run', 'missing.yaml']))\n"
    )
    assert "fedllm: missing.yaml: no such recipe file" in torchrun(str(script)).stderr


@pytest.mark.slow
def test_run_recipe_of_a_users_own_script_shares_the_work(tiny: Path, tmp_path: Path, one: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from fedllm import run_recipe\n"
        f"result = run_recipe({str(tiny / 'recipe.yaml')!r}, {OVERRIDES!r}, {str(tmp_path / 'run')!r})\n"
        "print(f'rounds {result.result[\"rounds\"]} {len(result.metrics)}', flush=True)\n"
    )
    done = launch(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rounds 4 4") == 2, "every process has the result"
    assert same_bits(tmp_path / "run", one)


@pytest.mark.slow
def test_a_killed_process_costs_the_rounds_since_the_last_checkpoint(tiny: Path, tmp_path: Path, one: Path) -> None:
    """torchrun --max-restarts starts all again, and they go on by themselves, though run.resume asks for a new run."""
    folder = tmp_path / "healed"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", "run.resume=never", *OVERRIDES]
    done = torchrun("tests/support/poisoned.py", *words, fault="1:3:kill-once", restarts=3)
    assert done.returncode == 0, done.stderr
    assert "process 1 ended without a word" in done.stderr
    assert done.stdout.count("going on after round 2 of 4") == 1
    assert same_bits(folder, one)
    assert numbers(folder) == numbers(one)


@pytest.mark.slow
def test_a_silent_process_is_waited_for_only_so_long(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", "run.timeout=4", *OVERRIDES]
    done = launch("tests/support/poisoned.py", *words, fault="1:2:sleep")
    assert done.returncode != 0
    assert "no answer for 4 s (run.timeout): process 1 was training in round 2: clients " in done.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]


@pytest.mark.slow
def test_processes_must_have_read_the_same_data(tiny: Path, tmp_path: Path) -> None:
    done = launch(
        "tests/support/poisoned.py", str(tiny / "recipe.yaml"), *OVERRIDES, "--dry-run", fault="1:0:other-data"
    )
    assert done.returncode != 0
    assert done.stderr.count("process 1 read other data than process 0 (it differs in: training") == 1


@pytest.mark.slow
def test_shares_change_nothing_but_rounding(tiny: Path, tmp_path: Path, one: Path) -> None:
    whole = run_recipe(tiny / "recipe.yaml", OVERRIDES, tmp_path / "whole").folder
    assert_close(one, whole)


def test_deal_evens_out_the_work() -> None:
    work = dict(enumerate([40, 20, 15, 10, 8, 7, 5, 4, 3, 2]))
    shares = deal(work, 2)
    assert sorted(client for share in shares for client in share) == sorted(work)
    assert [sum(work[client] for client in share) for share in shares] == [58, 56]
    assert deal({5: 1, 6: 3}, 4) == [[6], [5]]


@pytest.mark.parametrize("name", ["scaffold", "fadamgc", "fedadamw"])
@pytest.mark.parametrize("shares", [1, 2, 5])
def test_shares_in_memory_agree_to_rounding(name: str, shares: int) -> None:
    """Float64 sums of float64 vectors: what is left is the order of a sum."""
    problem = QuadraticProblem.random(8, 6)
    alg = load_algorithm(name, lr=0.01)
    setup = Setup(alg, problem, round_info(alg, problem, rounds=5, sampled=5, tracked=None, local_steps=3))
    results = []
    for plan in (Plan(), Plan(stacked_clients=2, parts=shares)):
        federation = start(setup, stacked_clients=plan.stacked_clients, parts=plan.parts)
        for t in range(5):
            run_round(setup, federation, *sample(0, t, 8, 5, 5), plan)
        results.append(federation.x)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
