"""Speed and memory of passes that hold several clients: the measurements behind `memory_plan.pass_bytes`.

python -m benchmarks.memory.stacked_clients             # writes results/memory/stacked_clients.json and .png
python -m benchmarks.memory.stacked_clients --cpu-time  # CPU seconds instead of wall seconds, on a shared machine
python -m benchmarks.memory.stacked_clients --draw      # only the picture, from the JSON file

A case is one local step of some clients of a recipe. It is computed one client at a time, and then with all clients
stacked, where a pass may save at most 0 (one client per pass), 32, 64, 128, ... MiB for its backward, as far as the
bound changes the passes. The settings alternate, in reversed order in every second repeat. Speed is the ratio to one
client at a time in the same repeat; for evaluation, the ratio to its smallest bound. Peak memory is that of the GPU or
of the process (Linux), and stands beside the estimate of memory_plan.py.
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
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from benchmarks.workload import Work
from fedllm.common.console import say
from fedllm.data.tokenization import Tokens
from fedllm.experiment.build import ReadCache
from fedllm.experiment.memory_plan import CPU_PASS, Need
from fedllm.experiment.records import versions
from fedllm.federation.rounds import Plan, run_round
from fedllm.federation.state import blank

RESULT = Path(__file__).resolve().parents[1] / "results" / "memory" / "stacked_clients.json"
MIB = 2**20
BOUNDS = [0, 32, 64, 128, 256, 512]  # MiB
GPT2 = ["model.name=openai-community/gpt2", "model.pretrained=false"]
SST2, BBC = "recipes/sst2_fadamgc.yaml", "recipes/quickstart.yaml"


@dataclass(frozen=True)
class Case:
    """One step of `clients` clients with batches of `batch`; evaluated: number of validation samples, if any."""

    model: str
    recipe: str
    overrides: list[str]
    clients: int
    batch: int
    evaluated: int = 0


CASES = [
    Case("MiniLM", SST2, [], 32, 2),
    Case("MiniLM", SST2, [], 8, 16, evaluated=150),
    Case("GPT-2", SST2, GPT2, 8, 2),
    Case("GPT-2", SST2, GPT2, 4, 8, evaluated=40),
    Case("MiniLM", BBC, ["data.max_length=64"], 8, 4),
]

Setting = tuple[int, int]  # clients stacked, MiB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_intermixed_args()
    if not arguments.draw:
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        cache = ReadCache()
        found = [measure(case, arguments.overrides, arguments.repeats, clock, cache) for case in CASES]
        facts = {"clock": clock.__name__, "overrides": arguments.overrides, "versions": versions(), "cases": found}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    draw(json.loads(arguments.out.read_text()), arguments.out.with_suffix(".png"))
    return 0


def measure(
    case: Case, overrides: list[str], repeats: int, clock: Callable[[], float], cache: ReadCache
) -> dict[str, Any]:
    """Speed and peak bytes of a case's settings, in training and in evaluation."""
    work = Work.of(case.recipe, [*case.overrides, *overrides], case.clients, 1, case.batch, cache=cache)
    job = work.job
    need = Need.of(job.algorithm, job.problem)
    training = []
    for row in timed(work, settings(work), train, repeats, clock):
        bound(work, row["bound_mib"])
        largest = max(job.problem.largest_pass(group, 1) for group in groups(work.clients, row["stacked_clients"]))
        row |= {"pass_tokens": largest, "estimated_bytes": need.bytes(row["stacked_clients"], largest)}
        row["client_steps_per_second"] = round(work.client_steps / row.pop("seconds"), 3)
        training.append(row)
        say(f"{case.model}, batch {case.batch}: {row}", "dim")
    evaluation = []
    if case.evaluated:
        evaluate = partial(evaluated, count=case.evaluated)
        for row in timed(work, [(1, mib) for mib in BOUNDS[1:]], evaluate, repeats, clock):
            row["batch_tokens"] = round(row["bound_mib"] * MIB / need.token)
            evaluation.append(row)
            say(f"{case.model}, evaluation: {row}", "dim")
    return {
        "model": case.model,
        "data": job.dataset.name,
        "batch": case.batch,
        "clients": case.clients,
        "tokens": round(work.tokens / work.client_steps, 1),
        "machine": [job.machine.device.type, job.machine.precision, job.machine.threads],
        "saved_bytes_per_token": round(need.token),
        "training": training,
        "evaluation": evaluation,
    }


def settings(work: Work) -> list[Setting]:
    """One client at a time; then all clients stacked, with each bound that changes the passes."""
    problem, found = work.job.problem, {}
    sizes = problem.rows.sizes([problem.batches.indices(client, 0, 0) for client in work.clients])
    for mib in BOUNDS:
        bound(work, mib)
        found.setdefault(tuple(some.stop for some in problem.passes.cut(sizes)), (len(work.clients), mib))
    return [(1, 0), *found.values()]


def bound(work: Work, mib: int) -> None:
    """Sets the MiB that a pass may save for its backward."""
    work.job.problem.passes.tokens = mib * MIB / work.job.problem.token_bytes


def timed(
    work: Work, settings: list[Setting], do: Callable[[Work, int], None], repeats: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Seconds (median), speed against the first setting (median, least, most) and peak bytes of each setting."""
    device = work.job.machine.device
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    peaks: dict[Setting, list[int]] = {setting: [] for setting in settings}
    for repeat in range(-1, repeats):
        for stacked, mib in settings[:: 1 if repeat % 2 else -1] if repeat >= 0 else settings[:1]:
            bound(work, mib)
            before = start_watch(device)
            began = clock()
            do(work, stacked)
            if repeat >= 0:
                seconds[stacked, mib].append(clock() - began)
                peaks[stacked, mib].append(peak(device) - before)
    rows = []
    for (stacked, mib), times in seconds.items():
        ratios = [first / this for first, this in zip(seconds[settings[0]], times, strict=True)]
        rows.append(
            {
                "stacked_clients": stacked,
                "bound_mib": mib,
                "seconds": round(statistics.median(times), 4),
                "speed": [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))],
                "peak_bytes": max(peaks[stacked, mib]),
            }
        )
    return rows


def groups(clients: list[int], size: int) -> list[list[int]]:
    """The clients in groups of `size`, which are trained together."""
    return [clients[begin : begin + size] for begin in range(0, len(clients), size)]


def train(work: Work, size: int) -> None:
    """The step of every client, `size` clients at a time."""
    job = work.job
    federation = blank(job.setup)
    run_round(job.setup, federation, work.clients, work.clients, Plan(size))
    if job.machine.device.type == "cuda":
        torch.cuda.synchronize()


def evaluated(work: Work, size: int, count: int) -> None:
    """The logits of the first `count` validation samples."""
    job = work.job
    tokens, end = job.validation, int(job.validation.offsets[count])
    first = Tokens(tokens.input_ids[:end], None, tokens.offsets[: count + 1], tokens.targets[:count])
    job.problem.outputs(job.problem.initial(), first)


def start_watch(device: torch.device) -> int:
    """Resets the peak; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, so that using it again counts
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes in use since start_watch."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """An entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def draw(facts: dict[str, Any], path: Path) -> None:
    """Speed of training over the bytes that its largest pass saves, speed of evaluation over its bound, and measured
    over estimated memory. Dashed: the bound that fedllm uses."""
    figure, (speed, evaluation, memory) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colors = {"MiniLM": plt.get_cmap("Blues"), "GPT-2": plt.get_cmap("Oranges")}
    drawn = dict.fromkeys(colors, 0)
    for case in facts["cases"]:
        model, rows = case["model"], case["training"]
        color = colors[model](0.4 + 0.15 * drawn[model])
        drawn[model] += 1
        label = f"{model}, {case['clients']} clients of {case['tokens']:.0f} tokens"
        saved = [row["pass_tokens"] * case["saved_bytes_per_token"] / MIB for row in rows]
        speeds, low, high = zip(*(row["speed"] for row in rows), strict=True)
        speed.plot(saved, speeds, "o-", color=color, label=label, markersize=4)
        speed.vlines(saved, low, high, color=color, linewidth=0.8)
        peaks = [row["peak_bytes"] / MIB for row in rows]
        memory.plot([row["estimated_bytes"] / MIB for row in rows], peaks, "o", color=color, markersize=4)
        if case["evaluation"]:
            bounds = [row["bound_mib"] for row in case["evaluation"]]
            speeds, low, high = zip(*(row["speed"] for row in case["evaluation"]), strict=True)
            evaluation.plot(bounds, speeds, "o-", color=color, label=model, markersize=4)
            evaluation.vlines(bounds, low, high, color=color, linewidth=0.8)
    for axes in (speed, evaluation):
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.axvline(CPU_PASS / MIB, color="0.3", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    speed.set(
        title="training",
        xlabel="MiB saved for backward by the largest pass",
        ylabel="speed, relative to one client at a time",
    )
    speed.set_ylim(top=speed.get_ylim()[1] + 0.5)
    speed.legend(fontsize=7, edgecolor="none", framealpha=1, loc="upper right")
    evaluation.set(title="evaluation", xlabel="bound, MiB", ylabel="speed, relative to a bound of 32 MiB")
    evaluation.legend(fontsize=7, frameon=False)
    ends = [20, 1000]
    memory.plot(ends, ends, color="0.6", linewidth=0.8)
    memory.set(
        title="memory in training",
        xscale="log",
        yscale="log",
        xlabel="estimated peak, MiB",
        ylabel="measured peak, MiB",
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
