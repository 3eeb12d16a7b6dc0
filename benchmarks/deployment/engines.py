"""Our engine beside Flower's: `python -m benchmarks.deployment.engines OUT.json [--rounds R] [--repeats N]`.

Runs the quickstart's recipe with each, in turn, in float32 and without evaluation; needs `make flower-simulation`.
Seconds of each round but the first, in which Ray's processes load the model, the time of the first, the largest
difference of the adapters, and the machine's load average at each start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedllm.experiment.run import run_recipe

ENGINES = ("fedllm", "flower")
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def measure(folder: Path, rounds: int, repeats: int, overrides: list[str]) -> dict[str, Any]:
    """Alternates the engines `repeats` times, `rounds` rounds each."""
    own = [f"federation.rounds={rounds}", f"eval.every={rounds}", "eval.target=null", "run.precision=float32"]
    own += ["run.device=cpu", "run.trackers=[]", f"run.checkpoint_every={rounds}", *overrides]
    first: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    later: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    loads, differences = [], []
    for repeat in range(repeats):
        order = ENGINES if repeat % 2 == 0 else ENGINES[::-1]
        for engine in order:
            loads.append((engine, round(os.getloadavg()[0], 2)))
            lines = run_recipe(RECIPE, [*own, f"run.engine={engine}"], folder / f"{engine}-{repeat}").metrics
            seconds = [line["seconds"] for line in lines]
            first[engine].append(round(seconds[0], 3))
            later[engine] += [round(value, 3) for value in seconds[1:]]
        differences.append(_difference(*(folder / f"{engine}-{repeat}" for engine in ENGINES)))
    medians = {engine: statistics.median(later[engine]) for engine in ENGINES}
    return {
        "median": medians,
        "ratio": round(medians["flower"] / medians["fedllm"], 2),
        "first_round": first,
        "later_rounds": later,
        "largest_difference": max(differences),
        "load": loads,
    }


def _difference(a: Path, b: Path) -> float:
    """The largest difference of two runs' adapters."""
    one, other = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (a, b))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def main() -> None:
    """Measures and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe, such as data.max_train=400")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), arguments.rounds, arguments.repeats, arguments.overrides)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
