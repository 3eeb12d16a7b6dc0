"""What Flower costs: `python -m benchmarks.deployment.measure OUT.json [--rounds R] [--largest BYTES]`.

transport: seconds for messages to two sites and back, by size, and the CPU time of an idle site's node.
rounds: seconds and bytes of a deployed round less those of the simulated one, of the same recipe, alternating.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from flower_federations import Federation

from fedllm.deployment.federation_folder import VALIDATION, read_server_folder
from fedllm.experiment.federation_trial import TRAINING, make_trial, run_trial
from fedllm.experiment.run import run_recipe

SIZES = (1_000, 1_000_000, 50_000_000)
IDLE = 60.0  # seconds


def echo(name: str, kind: str, body: bytes) -> bytes:
    """What the sites of `transport` answer: as many bytes as they were sent."""
    return body


def transport(folder: Path, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds until both of two sites have had a message and the server their answers of the same size."""
    federation = Federation(folder, echo)
    try:
        federation.wait_online()
        seconds = {size: [_there_and_back(federation, size) for _ in range(repeats)] for size in sizes}
        node = federation.sites.nodes["a"].pid
        began = _cpu_seconds(node)
        time.sleep(IDLE)
        idle = (_cpu_seconds(node) - began) / IDLE
        memory = {name: _peak_bytes(child.pid) for name, child in federation.sites.nodes.items()}
        return {"seconds": seconds, "idle_cpu_share": idle, "peak_bytes_of_a_node": memory["a"]}
    finally:
        federation.close()


def _there_and_back(federation: Federation, size: int) -> float:
    body = hashlib.sha256(str(time.time()).encode()).digest() * (size // 32)
    began = time.perf_counter()
    waiting = {federation.link.send(site, "train", body, 600.0) for site in (0, 1)}
    while waiting:
        for reply in federation.link.replies():
            assert reply.body == body, reply.why
            waiting.discard(reply.request)
        time.sleep(0.02)
    return round(time.perf_counter() - began, 3)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _peak_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def rounds(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """Seconds of each round, deployed and simulated in turn, on three sites of the quickstart."""
    make_trial(folder, 3)
    names = [site.name for site in read_server_folder(folder / "server").sites]
    together = folder / "train.csv"
    recipe = folder / "server" / "recipe.yaml"
    together.write_text(_together([folder / name / TRAINING for name in names], names))
    found: dict[str, list[float]] = {"deployed": [], "simulated": []}
    sent: dict[str, Any] = {}
    for repeat in range(repeats):
        overrides = [f"federation.rounds={count}", "eval.every=1000"]
        deployed = folder / f"deployed-{repeat}"
        run_trial(folder, [*overrides, f"run.dir={deployed}"])
        lines = [json.loads(line) for line in (deployed / "metrics.jsonl").read_text().splitlines()]
        found["deployed"] += [line["seconds"] for line in lines[1:]]
        sent = {name: lines[-1].get(name) for name in ("bytes_down", "bytes_up")}
        own = [f"data.train={together}", f"data.validation={folder / 'server' / VALIDATION}"]
        simulated = [*overrides, *own, f"run.dir={folder}/simulated-{repeat}"]
        found["simulated"] += [line["seconds"] for line in run_recipe(recipe, simulated).metrics[1:]]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"seconds": found, "median": medians, "overhead": medians["deployed"] - medians["simulated"], **sent}


def _together(files: Sequence[Path], names: Sequence[str]) -> str:
    """The sites' files as one, with the column `site`."""
    lines = ["text,label,site"]
    for path, name in zip(files, names, strict=True):
        lines += [f"{line},{name}" for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures both and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=500_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sizes = [*SIZES, arguments.largest]
        found = {"transport": transport(Path(scratch) / "transport", sizes, arguments.repeats)}
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
        found["rounds"] = rounds(Path(scratch) / "rounds", arguments.rounds, arguments.repeats)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
