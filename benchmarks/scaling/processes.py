"""Times a round with one process and with two, and counts the bytes that travel between the processes.

python -m benchmarks.scaling.processes recipes/sst2_fadamgc.yaml     # a table; ten CPU minutes
python -m benchmarks.scaling.processes recipes/quickstart.yaml --rounds 5 --repeats 2 --out FILE run.precision=float32

Three sides: one process with one thread, two processes with one thread each, and one process with two threads. They
alternate, and the first round of each is not counted. All processes reach one folder for the clients' vectors, so no
client's vectors travel. The model of the bytes is `received` in benchmarks/scaling/model.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.scaling.model import received
from fedllm import load_recipe
from fedllm.common.console import warn
from fedllm.experiment.build import with_dir
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.launch import executor_for
from fedllm.experiment.records import versions
from fedllm.experiment.session import open_session
from fedllm.experiment.training import ThisMachine
from fedllm.federation.rounds import Plan, run_round
from fedllm.federation.sampling import sample

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"1 process, 1 thread": (1, 1), "2 processes, 1 thread each": (2, 1), "1 process, 2 threads": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds per repeat (default 6)")
    parser.add_argument("--repeats", type=int, default=3, help="times that each side runs (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to the timed processes
    arguments = parser.parse_args()
    if arguments.folder is not None:
        rounds(arguments.recipe, arguments.overrides, arguments.rounds, arguments.folder)
        return
    found = measure(arguments.recipe, arguments.overrides, arguments.rounds, arguments.repeats)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Console().print(table(found))


def measure(recipe: str, overrides: list[str], count: int, repeats: int) -> dict[str, Any]:
    """The seconds and received bytes of every round, by side."""
    sides: dict[str, Any] = {name: {"seconds": [], "bytes": []} for name in SIDES}
    for _ in range(repeats):
        for name, (processes, threads) in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                options = ["--rounds", str(count), "--folder", folder]
                words = [recipe, *overrides, "run.device=cpu", f"run.threads={threads}", *options]
                answer = _launch(processes, words)
            sides[name]["seconds"] += answer["seconds"]
            sides[name]["bytes"] += answer["bytes"]
    return {
        "recipe": Path(recipe).name,
        "overrides": overrides,
        "versions": versions(),
        "sides": sides,
        "d": answer["d"],
        "predicted_bytes": {name: received(answer["algorithm"], answer["d"], of) for name, (of, _) in SIDES.items()},
    }


def _launch(processes: int, words: list[str]) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "benchmarks.scaling.processes", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rounds(path: str, overrides: list[str], count: int, folder: Path) -> None:
    """In one of the timed processes: rounds as a run has them, without evaluation. Rank 0 prints the numbers."""
    recipe = with_dir(load_recipe(path, overrides), folder)
    executor = executor_for(recipe.run)
    session = open_session(recipe, folder, executor, Checkpoints(folder / "checkpoints", warn), source=ThisMachine())
    job, info, state = session.job, session.job.info, session.state
    plan = Plan(job.stacked_clients, parts=session.facts.shares, executor=executor)
    seconds, received_bytes = [], []
    for _ in range(count + 1):
        clients, tracked = sample(recipe.run.seed, state.round, info.num_clients, info.sampled, info.tracked)
        began, before = time.perf_counter(), executor.bytes_received
        run_round(job.setup, state, clients, tracked, plan)
        seconds.append(time.perf_counter() - began)
        received_bytes.append(executor.bytes_received - before)
    if executor.rank == 0:
        facts = {"d": job.problem.dim, "algorithm": recipe.algorithm["name"]}
        answer = {**facts, "seconds": seconds[1:], "bytes": received_bytes[1:]}
        print(json.dumps(answer), flush=True)
    if executor.size > 1:
        dist.destroy_process_group()


def table(found: dict[str, Any]) -> Table:
    """Seconds per round (median, range, ratio to the last side) and bytes per round, with the model's."""
    title = f"{found['recipe']} {' '.join(found['overrides'])}, d = {found['d']:,}"
    answer = Table("side", "s per round", "range", "speed", "bytes received", "by the model", title=title)
    reference = statistics.median(list(found["sides"].values())[-1]["seconds"])
    for name, side in found["sides"].items():
        middle = statistics.median(side["seconds"])
        answer.add_row(
            name,
            f"{middle:.2f}",
            f"{min(side['seconds']):.2f} to {max(side['seconds']):.2f}",
            f"{reference / middle:.2f}",
            f"{statistics.median(side['bytes']):,.0f}",
            f"{found['predicted_bytes'][name]:,.0f}",
        )
    return answer


if __name__ == "__main__":
    main()
