"""How unequal the classes are that the clients of a round hold, in finished or unfinished runs.

python -m benchmarks.checks.round_labels runs/qnli-s0 runs/qnli-s1             # all rounds
python -m benchmarks.checks.round_labels runs/qnli-s0 --rounds 37 --below 0.3  # the first 37, another bound

A round's share is the share of the first class among all samples of the round's clients, from partition.json and
metrics.jsonl. A line for each run: the shares' mean and standard deviation, and the rounds whose share is below the
bound or above 1 minus the bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.results.reader import load_run
from fedllm.results.run_record import RunRecord


def shares(run: RunRecord) -> list[float]:
    """The share of the first class in each round."""
    if run.clients is None or not run.clients.counts:
        raise UserError(f"{run.folder}: partition.json has no counts of classes; expected a run of a classifier")
    counts = run.clients.counts
    found = []
    for line in run.rounds:
        totals = [sum(column) for column in zip(*(counts[client] for client in line["clients"]), strict=True)]
        found.append(totals[0] / sum(totals))
    return found


def line(run: RunRecord, rounds: int | None, below: float) -> str:
    """What is printed of a run."""
    found = shares(run)[:rounds]
    outside = [number for number, share in enumerate(found, 1) if not below <= share <= 1 - below]
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    return (
        f"{run.folder.name}: seed {run.seed}, {len(found)} rounds, share {statistics.mean(found):.2f} ± {spread:.2f}; "
        f"{len(outside)} rounds outside {below:g} to {1 - below:g}: {', '.join(map(str, outside)) or 'none'}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--rounds", type=int, metavar="N", help="only the first N rounds")
    parser.add_argument("--below", type=float, default=0.3, metavar="SHARE", help="the lower bound (default: 0.3)")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: found {options.rounds}, expected 1 or more")
    try:
        for folder in options.folders:
            print(line(load_run(folder), options.rounds, options.below))
    except UserError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
