"""Times one round of local training: fedllm, a bare loop over the clients, transformers.Trainer, and Flower.

python -m benchmarks.speed.measure recipes/sst2_fadamgc.yaml             # fedllm, bare loop, Trainer
python -m benchmarks.speed.measure recipes/sst2_fadamgc.yaml --flower    # also Flower: pip install "flwr[simulation]"
python -m benchmarks.speed.measure recipes/instruct_smollm2.yaml --steps 2 --batch 4  # a language model, see below
python -m benchmarks.speed.measure recipes/sst2_fadamgc.yaml --ablate    # fedllm without each of its parts
python -m benchmarks.speed.measure recipes/sst2_fadamgc.yaml --ablate --compile           # also torch.compile
python -m benchmarks.speed.measure recipes/sst2_fadamgc.yaml --stacked-clients 1,2,5      # fedllm, so many at once
python -m benchmarks.speed.measure recipes/qqp_fadamgc.yaml model.pretrained=false data.max_train=4000  # GPT-2 on a GPU

Every side trains the same clients on the same batches with AdamW, from the same weights. Before anything is timed, all
sides must reach the same mean weights. The sides alternate within each repeat. One line per side: seconds per round
(median), client-steps and tokens per second, the time relative to fedllm (median and range over the repeats), and the
peak memory in addition to the weights. On a GPU also the fraction of its peak arithmetic (--peak-tflops). For a
language model, TRL's SFTTrainer stands in the place of Trainer: pip install trl==1.16.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table
from torch import Tensor

from benchmarks.speed.peak_memory import PeakMemory
from benchmarks.speed.peers import flower, loop, sft_trainer, trainer
from benchmarks.workload import Plain, Work
from fedllm.common.console import console, say
from fedllm.experiment.build import ReadCache
from fedllm.experiment.records import versions
from fedllm.problems.lora.attention import NAME, set_attention

Side = Callable[[], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flower", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--stacked-clients", metavar="N,N", help="compare these numbers of clients trained together")
    parser.add_argument("--compile", action="store_true", help="with --ablate: also a model compiled by torch")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU, dense bfloat16 (H100, H200: 989)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_intermixed_args()
    shape = (arguments.clients, arguments.steps, arguments.batch)
    cache = ReadCache()
    work = Work.of(arguments.recipe, arguments.overrides, *shape, cache=cache)
    sides: dict[str, Side] = {"fedllm": work.ours}
    if arguments.stacked_clients:
        sizes = arguments.stacked_clients.split(",")
        sides |= {f"{size} stacked clients": partial(work.ours, int(size)) for size in sizes}
    elif arguments.ablate:
        sides["one client at a time"] = partial(work.ours, 1)
        switches = {"padded rows": ["run.slices=1"]}
        if work.job.machine.autocast is not None:
            switches["float32"] = ["run.precision=float32"]
        for name, off in switches.items():
            sides[name] = Work.of(arguments.recipe, [*arguments.overrides, *off], *shape, cache=cache).ours
        eager = Work.of(arguments.recipe, [*arguments.overrides, "run.slices=1"], *shape, cache=cache)
        set_attention(eager.job.model, NAME, "eager")
        sides["padded rows, eager attention"] = eager.ours
        if arguments.compile:
            compiled = Work.of(arguments.recipe, arguments.overrides, *shape, cache=cache)
            compiled.job.model.get_base_model().compile(dynamic=True)
            sides["torch.compile"] = compiled.ours
    else:
        plain = Plain.of(work.job)
        name, peer = ("SFTTrainer", sft_trainer) if work.job.task.generates else ("Trainer", trainer)
        sides |= {"bare loop": lambda: loop(work, plain), name: lambda: peer(work, plain)}
    _agree(sides)
    seconds, memory = _alternate(sides, arguments.repeats)
    if arguments.flower:
        before = statistics.median(seconds["fedllm"])
        say("Flower: starting its simulation engine")
        seconds["Flower"] = flower(arguments.recipe, arguments.overrides, *shape, arguments.repeats)
        after = statistics.median(_alternate({"fedllm": work.ours}, arguments.repeats)[0]["fedllm"])
        say(f"fedllm before Flower {before:.2f} s per round, after it {after:.2f} s")
    figures = {name: _figures(found, seconds["fedllm"], work) for name, found in seconds.items()}
    console.print(_table(figures, memory, work, arguments.peak_tflops))
    if arguments.out:
        facts = {"recipe": arguments.recipe, "overrides": arguments.overrides, "shape": shape, "versions": versions()}
        arguments.out.write_text(json.dumps({**facts, "sides": figures, "peak_bytes": memory}, indent=2) + "\n")
    return 0


def _agree(sides: dict[str, Side]) -> None:
    """One round of each side that is not timed; prints the distance of its mean weights from fedllm's."""
    ours = sides["fedllm"]()
    for name, side in sides.items():
        apart = float((side() - ours).norm() / ours.norm())
        say(f"{name}: mean weights differ from fedllm's by {apart:.1e}, relative")
        if apart > 1e-2:
            raise SystemExit(f"{name} does not do the same work: its mean weights differ from fedllm's by {apart:.1e}")


def _alternate(sides: dict[str, Side], repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each repeat by side, and each side's peak bytes, less what all sides hold already."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, int] = {}
    for repeat in range(repeats):
        for name, side in sides.items():
            peak = PeakMemory()
            began = time.perf_counter()
            side()
            most = peak.bytes()
            seconds[name].append(time.perf_counter() - began)
            if most is not None:
                memory[name] = max(most, memory.get(name, 0))
            say(f"repeat {repeat + 1} of {repeats}, {name}: {seconds[name][-1]:.2f} s", "dim")
    return seconds, memory


def _figures(seconds: list[float], ours: list[float], work: Work) -> dict[str, float]:
    ratios = [theirs / mine for theirs, mine in zip(seconds, ours, strict=True)]
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "client_steps_per_second": work.client_steps / middle,
        "tokens_per_second": work.tokens / middle,
        "teraflops": work.operations / middle / 1e12,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def _table(figures: dict[str, dict[str, float]], memory: dict[str, int], work: Work, peak_tflops: float) -> Table:
    job = work.job
    cuda = job.machine.device.type == "cuda"
    table = Table(
        title=f"{work.client_steps} client-steps of {job.recipe.name}, {job.machine.precision}, {job.machine.device}"
    )
    for heading in (
        "side",
        "s per round",
        "client-steps/s",
        "tokens/s",
        "relative",
        "range",
        *(("GiB",) if memory else ()),
        *(("MFU",) if cuda else ()),
    ):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name, found in figures.items():
        cells = [
            name,
            f"{found['seconds']:.3f}",
            f"{found['client_steps_per_second']:.1f}",
            f"{found['tokens_per_second']:.0f}",
            f"{found['ratio']:.2f}",
            f"{found['lowest']:.2f} to {found['highest']:.2f}",
        ]
        if memory:
            cells.append(f"{memory[name] / 2**30:.2f}" if name in memory else "-")
        if cuda:
            cells.append(f"{found['teraflops'] / peak_tflops:.1%}" if name in memory else "-")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
