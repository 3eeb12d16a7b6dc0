"""What several processes must agree on, checked in each: torchrun --nproc_per_node N collective_checks.py FOLDER.

Each check compares the collectives with the executor of one process, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm
from fedllm.aggregation.drift import spread_terms
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.product_gap import Product
from fedllm.aggregation.settings import PLAIN, RobustSettings
from fedllm.common.errors import RunError, UserError
from fedllm.config.settings import RunSettings
from fedllm.distributed import collectives
from fedllm.distributed.collectives import Collectives
from fedllm.experiment.launch import executor_for
from fedllm.federation.executor import CHUNK, Executor
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, RoundReport, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState


def parts(count: int, *shape: int) -> list[Tensor]:
    """Numbers of very different sizes, whose float64 sum depends on the order."""
    rng = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) * 10.0 ** (k % 5 * 4) for k in range(count)]


def check_sums_are_those_of_one_process(executor: Collectives) -> None:
    for count in (1, 2, 3, 4, 7):
        for length in (1, 5, 1000):
            everything = parts(count, length)
            like = torch.zeros(length, dtype=torch.float64)
            alone = Executor().sum_parts(everything, count, like)
            assert torch.equal(executor.sum_parts(executor.own(everything), count, like), alone), (count, length)
    backwards = Executor().sum_parts(parts(7, 1000)[::-1], 7, torch.zeros(1000, dtype=torch.float64))
    assert not torch.equal(alone, backwards), "or the order would not matter here"


def check_measured_sums_are_those_of_one_process(executor: Collectives) -> None:
    for length in (10, CHUNK, 3 * CHUNK + 17):
        everything = [part.square() for part in parts(4, 2, length)]
        like = torch.zeros(2, length, dtype=torch.float64)
        alone = Executor().measure_sums(everything, 4, like, lambda chunk: spread_terms(chunk, 9))
        found = executor.measure_sums(executor.own(everything), 4, like, lambda chunk: spread_terms(chunk, 9))
        assert torch.equal(found, alone), length


def check_bytes_received_are_counted(executor: Collectives) -> None:
    """Of n float64 numbers each process gets its run of every other part, then the others' sums of their runs."""
    before, n = executor.bytes_received, 12 * executor.size
    everything = parts(executor.size, n)
    executor.sum_parts(executor.own(everything), executor.size, torch.zeros(n, dtype=torch.float64))
    assert executor.bytes_received - before == 2 * (executor.size - 1) * 8 * n // executor.size
    before = executor.bytes_received
    executor.sum_parts(parts(1, n) if executor.rank == 0 else [], 1, torch.zeros(n, dtype=torch.float64))
    runs = executor.size - 1 if executor.rank == 0 else executor.size  # of the one part, then of all others' sums
    assert executor.bytes_received - before == runs * 8 * n // executor.size


def check_all_know_what_rank_0_found_and_what_went_wrong(executor: Collectives) -> None:
    assert executor.on_first(lambda: {"rank": executor.rank}) == {"rank": 0}
    for kind in (UserError, RunError):
        with pytest.raises(kind, match="only rank 0 tried"):
            executor.on_first(lambda kind=kind: raise_(kind("only rank 0 tried")))


def check_an_error_of_one_process_is_everybodys(executor: Collectives) -> None:
    def work() -> tuple[None, None]:
        if executor.rank == 1:
            raise ValueError("a fault of the test's own making")
        return None, None

    with pytest.raises(
        ValueError if executor.rank == 1 else RunError, match="a fault of the test's own making"
    ) as error:
        executor.together(work, lambda rank: f"being process {rank}")
    assert executor.rank == 1 or "process 1 failed while being process 1" in str(error.value)
    _, notes = executor.together(lambda: (None, executor.rank), lambda rank: "going on")
    assert notes == list(range(executor.size)), "all go on in step"


def check_rounds_are_those_of_one_process(executor: Collectives, folder: Path) -> None:
    """FAdamGC from full gradients, three of eight clients tracked; with files that all reach, and with none."""
    problem = QuadraticProblem.random(8, 6)
    alg = load_algorithm("fadamgc", lr=0.01, tracking_init="gradient")
    setup = Setup(alg, problem, round_info(alg, problem, rounds=6, sampled=5, tracked=3, local_steps=3))

    def run(by: Executor, files: Path | None) -> tuple[FederationState, list[RoundReport]]:
        state = start(setup, parts=4, executor=by, folder=files)
        plan = Plan(parts=4, executor=by)
        return state, [run_round(setup, state, *sample(0, t, 8, 5, 3), plan) for t in range(6)]

    alone, expected = run(Executor(), None)
    received = {}
    for place in ("shared", "apart"):
        mine = folder / place
        mine.mkdir(exist_ok=True)
        if place == "apart":  # as on hosts that share no folder
            collectives._reads = lambda path, text: executor.rank == 0
        before = executor.bytes_received
        state, found = run(executor, executor.share_folder(mine))
        executor.fetch(state.clients)
        assert torch.equal(state.x, alone.x), place
        assert all(torch.equal(state.server[name], value) for name, value in alone.server.items()), place
        if executor.rank == 0:
            theirs = state.clients.get(range(8))
            assert all(torch.equal(theirs[name], value) for name, value in alone.clients.get(range(8)).items()), place
        for ours, one in zip(found, expected, strict=True):
            assert (ours.train_loss, ours.bytes_up, ours.drift) == (one.train_loss, one.bytes_up, one.drift), place
        received[place] = executor.bytes_received - before
    assert received["apart"] > received["shared"], "clients' vectors travel where no folder is shared"


def check_robust_rounds_are_those_of_one_process(executor: Collectives) -> None:
    """Each rule, with the vectors of a client that is left out."""
    for robust in (
        RobustSettings("median", 1),
        RobustSettings("trimmed_mean", 1),
        RobustSettings("nnm_trimmed_mean", 1),
        RobustSettings("multi_krum", 1),
        RobustSettings(norm=1.1),
    ):
        problem = QuadraticProblem.random(8, 6, noise=0.1)
        alg = load_algorithm("scaffold" if robust.rule in ("mean", "multi_krum") else "localadamw", lr=0.01)
        info = round_info(alg, problem, rounds=6, sampled=6, tracked=None, local_steps=3)
        setup = Setup(alg, problem, info, Pipeline.of(PLAIN, alg, 0, robust))

        def run(by: Executor, setup: Setup = setup) -> tuple[FederationState, list[RoundReport]]:
            state = start(setup, parts=4, executor=by)
            plan = Plan(parts=4, executor=by, products=[Product(slice(0, 3), slice(3, 6), 1)])
            return state, [run_round(setup, state, *sample(0, t, 8, 6, 6), plan) for t in range(4)]

        (alone, expected), (state, found) = run(Executor()), run(executor)
        executor.fetch(state.clients)
        assert torch.equal(state.x, alone.x), robust.rule
        assert all(torch.equal(state.server[name], value) for name, value in alone.server.items()), robust.rule
        for ours, one in zip(found, expected, strict=True):
            assert (ours.rejected, ours.train_loss, ours.drift) == (one.rejected, one.train_loss, one.drift), (
                robust.rule
            )
            assert ours.drift["lora_gap"] is not None
            assert bool(one.rejected) == (robust.rule in ("mean", "multi_krum"))
        if executor.rank == 0:
            theirs = state.clients.get(range(8))
            assert all(torch.equal(theirs[name], value) for name, value in alone.clients.get(range(8)).items())


def raise_(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    executor = executor_for(RunSettings(device="cpu", timeout=60.0))
    assert isinstance(executor, Collectives)
    check_sums_are_those_of_one_process(executor)
    check_measured_sums_are_those_of_one_process(executor)
    check_bytes_received_are_counted(executor)
    check_all_know_what_rank_0_found_and_what_went_wrong(executor)
    check_an_error_of_one_process_is_everybodys(executor)
    check_rounds_are_those_of_one_process(executor, Path(sys.argv[1]))
    check_robust_rounds_are_those_of_one_process(executor)
    print(f"rank {executor.rank} of {executor.size}: all agree", flush=True)
