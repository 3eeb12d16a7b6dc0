"""Times commands that need no model, and lists the slow libraries that each imports.

python -m benchmarks.startup.measure                       # ten times each, a table
python -m benchmarks.startup.measure --repeats 30 --out benchmarks/results/startup/measure.json

Each command runs in a new process, timed from its start to its exit, with the fedllm of this repository. The commands
alternate, so that a slow moment of the machine affects all of them. One more process per command, which is not timed,
finds the libraries that it imports.
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

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RECIPE, GRID = ROOT / "recipes" / "quickstart.yaml", ROOT / "recipes" / "sweeps" / "fedadamw_alpha.yaml"
HEAVY = (
    "torch", "transformers", "numpy", "pandas", "matplotlib", "datasets", "accelerate", "peft", "sklearn", "scipy",
    "pydantic", "rich", "yaml",
)  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "--help": ["--help"],
    "run --help": ["run", "--help"],
    "run, no such recipe": ["run", "missing.yaml"],
    "run, unknown key": ["run", str(RECIPE), "algorithm.lrr=1"],
    "sweep, no such grid": ["sweep", str(RECIPE), "missing.yaml"],
    "sweep --dry-run, 5 cells": ["sweep", str(RECIPE), str(GRID), "--dry-run"],
    "report, no run": ["report", "missing"],
    "algorithms": ["algorithms"],
    "doctor": ["doctor"],
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RUN = "import sys; from fedllm.cli import main; sys.exit(main(sys.argv[1:]))"
LIST = """
import contextlib, io, json, sys
from fedllm.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="timed processes per command (default 10)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        imported = {name: heavy_imports(words, folder) for name, words in COMMANDS.items()}  # and fills the file cache
        for _ in range(arguments.repeats):
            for name, words in COMMANDS.items():
                seconds[name].append(timed(words, folder))
    Console().print(table(seconds, imported))
    if arguments.out:
        figures = {name: {"seconds": seconds[name], "imports": imported[name]} for name in COMMANDS}
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


def timed(words: list[str], folder: str) -> float:
    """Seconds of a command from the start of its process to its exit."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", RUN, *words], cwd=folder, env=ENVIRONMENT, capture_output=True)
    return time.perf_counter() - began


def heavy_imports(words: list[str], folder: str) -> list[str]:
    """The libraries of HEAVY that a command imports."""
    done = subprocess.run(
        [sys.executable, "-c", LIST, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return [name for name in HEAVY if name in json.loads(done.stdout)]


def table(seconds: dict[str, list[float]], imported: dict[str, list[str]]) -> Table:
    """One row per command: its fastest, median and slowest process, and the libraries of HEAVY that it imports."""
    found = Table("fedllm", "min s", "median s", "max s", "imports")
    for name, times in seconds.items():
        figures = (min(times), statistics.median(times), max(times))
        found.add_row(name, *(f"{figure:.2f}" for figure in figures), ", ".join(imported[name]) or "-")
    return found


if __name__ == "__main__":
    main()
