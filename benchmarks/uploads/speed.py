"""What the keys `uploads`, `robust` and `downloads`, and lora_gap, add to the time of a round.

python -m benchmarks.uploads.speed                                        # the quickstart
python -m benchmarks.uploads.speed recipes/sst2_fadamgc.yaml --repeats 9 --out FILE
python -m benchmarks.uploads.speed --faulty 2 federation.clients_per_round=8

All sides compute round 1 of the recipe with the same clients, from the same x, in one process, one after the other in
each repeat. One line per side: seconds of the round and CPU seconds of the process (medians), and the time relative to
the recipe as it is (median, lowest and highest over the repeats, of CPU seconds, which other work disturbs less).

"outside" are the seconds of the round outside the clients' local steps, where all of these keys work, and "adds" is how
much longer they are than those of the recipe as it is, in percent of its round (medians). On a machine whose speed
varies, these say more than the ratio of two whole rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.table import Table

from fedllm import load_recipe
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import MEAN, PLAIN, DownloadsSettings, RobustSettings, UploadsSettings
from fedllm.common.console import console, say
from fedllm.common.profiling import Profile, end_round, running
from fedllm.experiment.build import assemble
from fedllm.experiment.job import Job
from fedllm.experiment.records import versions
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup

BASE = "as it is"
LOCAL = ("data", "forward", "backward", "optimizer")


class Taken(NamedTuple):
    """Seconds of a round: all, of CPU, and outside the clients' local steps."""

    seconds: float
    cpu: float
    outside: float


Times = dict[str, list[Taken]]  # side -> each repeat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--faulty", type=int, default=3, help="of multi_krum")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_intermixed_args()
    if "=" in arguments.recipe:
        arguments.overrides, arguments.recipe = [arguments.recipe, *arguments.overrides], parser.get_default("recipe")
    job = assemble(load_recipe(arguments.recipe, arguments.overrides))
    times = measure(job, sides(job, arguments.faulty), arguments.repeats)
    figures = {name: summary(found, times[BASE]) for name, found in times.items()}
    console.print(table(figures))
    if arguments.out:
        facts = {"recipe": arguments.recipe, "overrides": arguments.overrides, "versions": versions()}
        arguments.out.write_text(json.dumps({**facts, "sides": figures}, indent=2) + "\n")
    return 0


def sides(job: Job, faulty: int) -> dict[str, tuple[Setup, Plan]]:
    """What is timed, by name. lora_gap alone is measured where the others are not."""
    plan = Plan(stacked_clients=job.stacked_clients)
    seed, plain = job.recipe.run.seed, Setup(job.algorithm, job.problem, job.info)

    def of(uploads: UploadsSettings = PLAIN, robust: RobustSettings = MEAN) -> tuple[Setup, Plan]:
        return replace(plain, pipeline=Pipeline.of(uploads, job.algorithm, seed, robust)), plan

    krum = RobustSettings("multi_krum", faulty)
    return {
        BASE: (plain, plan),
        "lora_gap": (plain, replace(plan, products=job.products)),
        "uploads.bits=int8": of(UploadsSettings(bits="int8")),
        "robust.rule=multi_krum": of(robust=krum),
        "both": of(UploadsSettings(bits="int8"), krum),
        "downloads.bits=bfloat16": (replace(plain, downloads=DownloadsSettings("bfloat16")), plan),
    }


def measure(job: Job, sides: dict[str, tuple[Setup, Plan]], repeats: int) -> Times:
    """The times of all sides. The first round of each is not counted."""
    info, times = job.info, Times()
    clients, tracked = sample(job.recipe.run.seed, 0, info.num_clients, info.sampled, info.tracked)
    for repeat in range(repeats + 1):
        for name, (setup, plan) in sides.items():
            state = start(setup)
            with TemporaryDirectory() as folder:
                profile = Profile(Path(folder) / "profile.json", state.x.device)
                with running(profile):
                    began = time.process_time()
                    run_round(setup, state, clients, tracked, plan)
                    cpu = time.process_time() - began
                    end_round(1)
            (line,) = profile.rounds
            taken = Taken(line["seconds"], cpu, line["seconds"] - sum(line[part] for part in LOCAL))
            if repeat:
                times.setdefault(name, []).append(taken)
                say(f"repeat {repeat} of {repeats}, {name}: {taken.seconds:.2f} s, {taken.cpu:.2f} s of CPU", "dim")
    return times


def summary(found: list[Taken], base: list[Taken]) -> dict[str, float]:
    """The medians of a side and its CPU seconds relative to those of the base in the same repeat."""
    ratios = [mine.cpu / theirs.cpu for mine, theirs in zip(found, base, strict=True)]
    outside, usual = (statistics.median(taken.outside for taken in each) for each in (found, base))
    return {
        "seconds": statistics.median(taken.seconds for taken in found),
        "cpu_seconds": statistics.median(taken.cpu for taken in found),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "outside": outside,
        "adds": (outside - usual) / statistics.median(taken.seconds for taken in base),
    }


def table(figures: dict[str, dict[str, float]]) -> Table:
    found = Table("side", "s", "CPU s", "ratio", "range", "outside", "adds", box=None)
    for name, of in figures.items():
        values = [f"{of[key]:.3f}" for key in ("seconds", "cpu_seconds", "ratio")]
        spread = f"{of['lowest']:.3f} to {of['highest']:.3f}"
        found.add_row(name, *values, spread, f"{of['outside']:.3f}", f"{of['adds']:.2%}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
