"""How fast cohorts of different sizes train, and what memory they take: what the rule of `run.cohort: auto` rests on.

python benchmarks/cohort.py                  # writes cohort.json and cohort.png beside this file
python benchmarks/cohort.py --cpu-time       # seconds of the processor instead of the clock, where other work shares it
python benchmarks/cohort.py --draw           # the picture again, from cohort.json

Each case is one local step of some clients of a recipe; the sizes alternate, their order reversed in every repeat, and
speed is told as the ratio to one client at a time in the same repeat. Peak memory is the GPU's or the process's
(Linux), beside the estimate of fedllm.sizing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from workload import Work

from fedllm.assemble import Shelf
from fedllm.console import say
from fedllm.records import versions
from fedllm.rounds import Plan, blank, run_round
from fedllm.sizing import CPU_KEPT, Need

HERE = Path(__file__).parent
GPT2 = ["model.name=openai-community/gpt2", "model.pretrained=false"]


@dataclass(frozen=True)
class Case:
    """One step of `clients` clients with batches of `batch`, in cohorts of 1, 2, 4, ... of them."""

    model: str
    recipe: str
    overrides: list[str]
    clients: int
    batch: int

    @property
    def sizes(self) -> list[int]:
        """The cohort sizes."""
        return [2**power for power in range(self.clients.bit_length())]


SST2, BBC = "recipes/sst2_fadamgc.yaml", "recipes/quickstart.yaml"
CASES = [
    *(Case("MiniLM", SST2, [], clients, batch) for clients, batch in ((16, 2), (16, 4), (8, 16), (8, 32))),
    *(Case("MiniLM", BBC, [f"data.max_length={length}"], 8, 4) for length in (64, 128)),
    Case("GPT-2", SST2, GPT2, 8, 2),
    Case("GPT-2", SST2, GPT2, 4, 8),
    Case("GPT-2", BBC, [*GPT2, "data.max_length=64"], 4, 4),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "cohort.json")
    arguments = parser.parse_intermixed_args()
    if not arguments.draw:
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        shelf = Shelf()
        found = [measure(case, arguments.overrides, arguments.repeats, clock, shelf) for case in CASES]
        facts = {"clock": clock.__name__, "overrides": arguments.overrides, "versions": versions(), "cases": found}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    draw(json.loads(arguments.out.read_text()), arguments.out.with_suffix(".png"))
    return 0


def measure(case: Case, overrides: list[str], repeats: int, clock: Callable[[], float], shelf: Shelf) -> dict[str, Any]:
    """Client-steps a second and peak bytes of each cohort size."""
    work = Work.of(case.recipe, [*case.overrides, *overrides], case.clients, 1, case.batch, shelf=shelf)
    job, device = work.job, work.job.machine.device
    seconds: dict[int, list[float]] = {size: [] for size in case.sizes}
    peaks: dict[int, list[int]] = {size: [] for size in case.sizes}
    train(work, 1)
    for repeat in range(repeats):
        for size in case.sizes[:: 1 if repeat % 2 else -1]:
            before = start_watch(device)
            began = clock()
            train(work, size)
            seconds[size].append(clock() - began)
            peaks[size].append(peak(device) - before)
    estimate = Need.of(job.algorithm, job.problem, job.info)
    rows = []
    for size, times in seconds.items():
        ratios = [alone / together for alone, together in zip(seconds[1], times, strict=True)]
        tokens = max(job.problem.pass_tokens(cohort, 1) for cohort in dealt(work.clients, size))
        rows.append(
            {
                "cohort": size,
                "client_steps_per_second": round(work.client_steps / statistics.median(times), 3),
                "speed": [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))],
                "pass_tokens": tokens,
                "peak_bytes": max(peaks[size]),
                "estimated_bytes": estimate.bytes(size, tokens),
            }
        )
        say(f"{case.model}, batch {case.batch}, cohort {size}: {rows[-1]}", "dim")
    return {
        "model": case.model,
        "data": job.task.name,
        "batch": case.batch,
        "tokens": round(work.tokens / work.client_steps, 1),
        "hidden": job.model.config.hidden_size,
        "machine": [device.type, job.machine.precision, job.machine.threads],
        "kept_bytes_a_token": round(estimate.token),
        "rows": rows,
    }


def dealt(clients: list[int], size: int) -> list[list[int]]:
    """The cohorts of this size."""
    return [clients[begin : begin + size] for begin in range(0, len(clients), size)]


def train(work: Work, size: int) -> None:
    """The step of every client, in cohorts of `size`."""
    job = work.job
    federation = blank(job.algorithm, job.problem, job.info)
    run_round(job.algorithm, job.problem, federation, job.info, work.clients, work.clients, Plan(size))
    if job.machine.device.type == "cuda":
        torch.cuda.synchronize()


def start_watch(device: torch.device) -> int:
    """Begins to watch for the peak; bytes that are taken already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that taking it again is seen
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes that were taken since start_watch."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """A figure of the process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def draw(facts: dict[str, Any], path: Path) -> None:
    """Speed against what a pass keeps, with the rule's bound; measured against estimated memory."""
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colors = {"MiniLM": plt.get_cmap("Blues"), "GPT-2": plt.get_cmap("Oranges")}
    drawn = dict.fromkeys(colors, 0)
    for case in facts["cases"]:
        model, rows = case["model"], case["rows"]
        color = colors[model](0.4 + 0.11 * drawn[model])
        drawn[model] += 1
        label = f"{model}, batch {case['batch']}, {case['tokens']:.0f} tokens"
        kept = [row["pass_tokens"] * case["kept_bytes_a_token"] / 2**20 for row in rows]
        speed.plot(kept, [row["speed"][0] for row in rows], "o-", color=color, label=label, markersize=4)
        if rows[0]["peak_bytes"]:
            peaks = [row["peak_bytes"] / 2**20 for row in rows]
            estimated = [row["estimated_bytes"] / 2**20 for row in rows]
            memory.plot(estimated, peaks, "o", color=color, markersize=4)
    speed.axhline(1, color="0.6", linewidth=0.8)
    speed.axvline(CPU_KEPT / 2**20, color="0.3", linewidth=0.8, linestyle="--")
    speed.set(xscale="log", xlabel="MiB that the largest pass keeps", ylabel="times as fast as one client at a time")
    speed.legend(fontsize=7, frameon=False, loc="upper right")
    speed.set_ylim(top=1.75)
    ends = [50, 2000]
    memory.plot(ends, ends, color="0.6", linewidth=0.8)
    memory.set(xscale="log", yscale="log", xlabel="estimated peak, MiB", ylabel="measured peak, MiB")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
