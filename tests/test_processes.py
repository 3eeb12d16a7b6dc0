"""Several processes: the same result as one, state that follows its client, failures that are named.

Each launch pays for the start of its processes, so several things are looked at in one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapters import assert_close, same_bits
from safetensors.torch import load_file
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, load_recipe, run_recipe
from fedllm.assemble import Job
from fedllm.crew import Captain, Crew
from fedllm.errors import RunError, UserError
from fedllm.processes import Links, LostError, StoppedError, _stop
from fedllm.rounds import Federation, Plan, round_info, run_round, sample, start
from fedllm.tokens import Tokens
from fedllm.training import deal
from fedllm.worker import _Worker

REPO = Path(__file__).resolve().parents[1]
CPU = SimpleNamespace(device=torch.device("cpu"))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def launch(script: str, *words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Two processes under torchrun, which must end within five minutes, also where other work shares the cores."""
    command = [*TORCHRUN, "--nproc_per_node", "2", script, *words]
    environment = {**ENVIRONMENT, "FEDLLM_TEST_FAULT": fault}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def numbers(folder: Path) -> list[dict[str, object]]:
    timed = {"seconds", "simulated_seconds", "eval_seconds"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


OVERRIDES = ["run.threads=1", "algorithm.tracking_init=gradient"]


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run in one process, with the two shares that two processes would have."""
    threads = torch.get_num_threads()
    yield run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], tmp_path_factory.mktemp("one") / "run").folder
    torch.set_num_threads(threads)


def test_two_processes_give_the_bits_of_one(tiny: Path, tmp_path: Path, one: Path) -> None:
    """FAdamGC over four rounds, its start from full gradients included; state, metrics and evaluation too. Then one
    process goes on from a checkpoint of two."""
    folder = tmp_path / "two"
    done = launch("scripts/fedtune.py", str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES, "--profile")
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


def test_a_sweep_on_two_machines_gives_the_bits_of_one_process(tiny: Path, tmp_path: Path, one: Path) -> None:
    """A launcher for each, as on machines of their own: the second one's process has neither recipe nor grid."""
    (tmp_path / "grid.yaml").write_text("grid: {algorithm.lr: [0.01, 0.02]}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["-m", "fedllm", "sweep", str(tiny / "recipe.yaml"), str(tmp_path / "grid.yaml"), *OVERRIDES]
    meeting = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    port = str(free_port())
    machines = [
        subprocess.Popen(
            [*TORCHRUN, *meeting, "--master_port", port, "--node_rank", node, *rest],
            cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, folder, rest in (("0", tmp_path, words), ("1", elsewhere, ["-m", "fedllm", "sweep", "-", "-"]))
    ]  # fmt: skip
    said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    runs = tmp_path / "runs" / "recipe-grid"
    assert same_bits(runs / "lr=0.01-s0", one)
    assert numbers(runs / "lr=0.01-s0") == numbers(one)
    assert not same_bits(runs / "lr=0.02-s0", one)
    assert (runs / "report" / "report.html").is_file()
    assert list(elsewhere.iterdir()) == []


def test_a_killed_process_is_named_and_the_run_goes_on_later(tiny: Path, tmp_path: Path, one: Path) -> None:
    folder = tmp_path / "killed"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    done = launch("tests/poisoned.py", *words, fault="1:3:kill")
    assert done.returncode != 0
    assert "process 1 ended without a word" in done.stderr
    assert "while training in round 3: clients " in done.stderr
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["000001", "000002"]
    run_recipe(tiny / "recipe.yaml", OVERRIDES, folder)
    assert same_bits(folder, one)


def test_a_clients_failure_in_another_process_is_named(tiny: Path, tmp_path: Path) -> None:
    """A client of process 1 sends nan in round 1 and is rejected; in round 2 one raises, which ends the run."""
    folder = tmp_path / "failing"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES]
    done = launch("tests/poisoned.py", *words, fault="1:1:nan 1:2:raise")
    assert done.returncode != 0
    first = numbers(folder)[0]
    (client,) = first["rejected"]
    assert f"client {client} rejected" in done.stdout
    assert "process 1 failed while training in round 2: clients " in done.stderr
    assert "a fault of the test's own making" in done.stderr
    assert "Round 2, while these clients trained together: " in done.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]


def test_memory_that_gives_out_in_one_process_makes_all_cohorts_smaller(tiny: Path, tmp_path: Path) -> None:
    """Four clients each; from round 2 on process 1 has room for two, in its forward pass, and says so by torch's own
    error. Process 0, which has room, goes on with two from round 3 on; the result is that of one process. Evaluation,
    of 40 samples, has room for ten there."""
    more = ["federation={rounds: 3, clients_per_round: 8}"]
    folder = tmp_path / "crowded"
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", *OVERRIDES, *more]
    done = launch("tests/poisoned.py", *words, fault="1:2:full")
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
    assert "round 2: cohorts of 8 do not fit into memory; that round was done with cohorts of 2" in said
    machine = json.loads((folder / "result.json").read_text())["machine"]
    assert machine["cohort"] == 2
    assert machine["stepped_down"] == [{"round": 2, "cohort": 2}, {"round": 2, "eval_cuts": 4}]

    threads = torch.get_num_threads()
    alone = run_recipe(tiny / "recipe.yaml", [*OVERRIDES, *more], tmp_path / "alone")
    torch.set_num_threads(threads)
    assert (alone.result["machine"]["cohort"], alone.result["machine"]["stepped_down"]) == (8, [])
    assert_close(folder, alone.folder)
    ours = [line["train_loss"] for line in numbers(folder)]
    assert ours == pytest.approx([line["train_loss"] for line in alone.metrics], rel=1e-4)


def test_a_users_mistake_is_told_once(tiny: Path) -> None:
    done = launch("scripts/fedtune.py", str(tiny / "recipe.yaml"), "algorithm.lr=-1")
    assert done.returncode != 0
    assert done.stderr.count("fedllm: ") == 1
    assert "exitcode  : 2" in done.stderr


def test_run_recipe_refuses_many_processes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="started as 2 processes, which run_recipe does not join"):
        run_recipe(tiny / "recipe.yaml", OVERRIDES, tmp_path / "run")


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
    info = round_info(alg, problem, rounds=5, sampled=5, tracked=None, local_steps=3)
    results = []
    for plan in (Plan(), Plan(cohort=2, shares=shares)):
        federation = start(alg, problem, info, cohort=plan.cohort, shares=plan.shares)
        for t in range(5):
            run_round(alg, problem, federation, info, *sample(0, t, 8, 5, 5), plan)
        results.append(federation.x)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def captain() -> tuple[Captain, Links]:
    """A captain and the other end of its one link."""
    ours, theirs = Pipe()
    return Captain(Links({1: ours}, 2)), Links({0: theirs}, 2)


@pytest.mark.parametrize("same_machine", [True, False])
def test_what_clients_keep_goes_by_file_on_one_machine_and_else_by_message(tmp_path: Path, same_machine: bool) -> None:
    """FAdamGC from full gradients on, bit for bit as one process; a worker finds another token on another machine."""
    problem = QuadraticProblem.random(8, 6)
    alg = load_algorithm("fadamgc", lr=0.01, tracking_init="gradient")
    info = round_info(alg, problem, rounds=4, sampled=5, tracked=3, local_steps=3)
    crew, link = captain()
    worker = _Worker(link)
    worker._job = cast("Job", SimpleNamespace(problem=problem, algorithm=alg, info=info, machine=CPU))
    sent: list[str] = []

    def serve() -> None:
        while link.ready([0], 60.0):
            try:
                head, tensors = link.receive(0)
            except LostError:
                return
            if head["do"] == "share" and not same_machine:
                head["token"] = "of another machine"
            answer, found = worker.do(head, tensors)
            sent.extend([*tensors, *found])
            link.send(0, {**answer, "call": head["call"]}, found)

    def rounds(crew: Crew, folder: Path) -> Federation:
        folder.mkdir()
        crew.share(folder)
        federation = start(alg, problem, info, shares=2, crew=crew, folder=folder)
        for t in range(4):
            run_round(alg, problem, federation, info, *sample(0, t, 8, 5, 3), Plan(shares=2, crew=crew))
        return federation

    thread = threading.Thread(target=serve)
    thread.start()
    together = rounds(crew, tmp_path / "together")
    crew._links._connections[1].close()
    thread.join()
    alone = rounds(Crew(), tmp_path / "alone")
    assert torch.equal(together.x, alone.x)
    ours, theirs = together.clients.get(range(8)), alone.clients.get(range(8))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any("client/" in name for name in sent) == (not same_machine)
    assert len(list((tmp_path / "together").iterdir())) == 8, "a file a client, nothing else"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_messages_bring_tensors_as_they_were(dtype: torch.dtype) -> None:
    here, there = Pipe()
    sender, receiver = Links({1: here}, 2), Links({0: there}, 2)
    numbers = torch.randn(3, 500_000).to(dtype)  # more than a pipe holds
    tensors = {"turned": numbers.T, "part": numbers[:, ::2], "none": numbers[:0], "one": numbers[0, 0], "": numbers[1]}
    thread = threading.Thread(target=lambda: sender.send(1, {"round": 3}, tensors))
    thread.start()
    head, found = receiver.receive(0)
    thread.join()
    assert head == {"round": 3}
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], value) and found[name].dtype == dtype for name, value in tensors.items())


def test_a_process_that_is_lost_in_the_middle_of_a_message_is_lost() -> None:
    here, there = Pipe()
    receiver = Links({0: there}, 2)
    here.send_bytes(json.dumps([{}, [["x", "float32", [10]]]]).encode())
    here.close()
    with pytest.raises(LostError):
        receiver.receive(0)


class Evaluated:
    """In place of a LoraProblem: zeros for the logits of two samples, after `first`, if there is one to call."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self.eval_cuts, self._first = 1, first

    def logits(self, x: Tensor, tokens: Tokens, part: int = 0, parts: int = 1) -> Tensor:
        self._first()
        return torch.zeros(2, 1)


def logits(crew: Captain, problem: Any) -> Tensor:
    return crew.logits(problem, torch.zeros(3), cast("Tokens", None))


def test_a_silent_process_is_waited_for_only_so_long() -> None:
    crew, _worker = captain()
    crew._links.timeout = 0.05
    with pytest.raises(RunError, match=r"no answer for 0.05 s \(run.timeout\): process 1 was evaluating"):
        logits(crew, Evaluated())


def test_processes_must_have_read_the_same_data() -> None:
    crew, worker = captain()

    def answer() -> None:
        head, _ = worker.receive(0)
        worker.send(0, {"call": head["call"], "data": {"training": "b", "validation": "a"}}, {})

    job = SimpleNamespace(data={"training": "a", "validation": "a"})
    recipe = load_recipe(REPO / "recipes" / "quickstart.yaml")
    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(UserError, match=r"process 1 read other data than process 0 \(it differs in: training\)"):
        crew.assemble(recipe, lambda: cast("Job", job))
    thread.join()


def test_a_late_answer_is_not_taken_for_another_one() -> None:
    """A sweep goes on after a run that failed; the answer to what was asked before it failed is thrown away."""
    crew, worker = captain()

    def answer(value: float) -> None:
        head, _ = worker.receive(0)
        worker.send(0, {"call": head["call"], "cuts": 1}, {"logits": torch.full((2, 1), value)})

    def fail() -> None:
        raise RunError("our own part")

    with pytest.raises(RunError, match="our own part"):
        logits(crew, Evaluated(fail))
    answers: Sequence[float] = (1.0, 2.0)
    thread = threading.Thread(target=lambda: [answer(value) for value in answers])
    thread.start()
    assert logits(crew, Evaluated()).tolist() == [[2.0], [2.0]]
    thread.join()


def test_a_lost_process_is_named_though_the_launcher_stops_this_one_meanwhile() -> None:
    """torchrun sends SIGTERM to the others when a process dies: before rank 0 has looked, or just after it has."""
    crew, worker = captain()

    def lose() -> None:
        worker.close()
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with pytest.raises(StoppedError, match=r"process 1 ended without a word .* while evaluating"):
            logits(crew, Evaluated(lose))
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
