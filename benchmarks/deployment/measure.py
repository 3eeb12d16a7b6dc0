"""What Flower costs: `python -m benchmarks.deployment.measure PART OUT.json`, with one of these parts.

transport: seconds for messages to two sites and back, by size (--largest BYTES), and the CPU share of an idle node.
rounds: seconds and bytes of a deployed round less those of the simulated one, of the same recipe, in turn (--rounds R,
  --repeats N), and the peak memory of the three sites' processes.
waiting: the CPU share of a whole site, `fedllm site` with its node, that waits for a run (--idle SECONDS).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from flower_federations import Federation, until

from fedllm.deployment.federation_folder import VALIDATION, read_server_folder
from fedllm.deployment.flower_server import FlowerServer
from fedllm.experiment.federation_trial import TRAINING, make_trial, run_trial
from fedllm.experiment.run import run_recipe

SIZES = (1_000, 1_000_000, 50_000_000)
LATELY = 65.0  # seconds after which a node asks for messages less often


def echo(name: str, kind: str, body: bytes) -> bytes:
    """What the sites of `transport` answer: as many bytes as they were sent."""
    return body


def transport(folder: Path, sizes: Sequence[int], repeats: int, idle: float) -> dict[str, Any]:
    """Seconds until both of two sites have had a message and the server their answers of the same size."""
    federation = Federation(folder, echo)
    try:
        federation.wait_online()
        seconds = {size: [_there_and_back(federation, size) for _ in range(repeats)] for size in sizes}
        node = federation.sites.nodes["a"].pid
        share = _cpu_share([node], idle)
        return {"seconds": seconds, "idle_cpu_share": share, "peak_bytes_of_a_node": _peak_bytes(node)}
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


def waiting(folder: Path, idle: float) -> dict[str, Any]:
    """The CPU share of a site that waits for a run: its process and its node, once it asks seldom."""
    make_trial(folder, 2)
    with FlowerServer(read_server_folder(folder / "server")) as server:
        command = [sys.executable, "-m", "fedllm", "site", str(folder / "site-0" / "site.yaml")]
        site = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until(lambda: server.link.online() or None)
            time.sleep(min(LATELY, idle))
            family = [site.pid, *_children(site.pid)]
            peaks = {_command(process): _peak_bytes(process) for process in family}
            return {"idle_cpu_share": _cpu_share(family, idle), "peak_bytes": peaks}
        finally:
            site.terminate()
            site.wait(60)


def _cpu_share(processes: Sequence[int], seconds: float) -> float:
    began = sum(map(_cpu_seconds, processes))
    time.sleep(seconds)
    return round((sum(map(_cpu_seconds, processes)) - began) / seconds, 5)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _children(process: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    found = [
        int(word) for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()
    ]
    return [*found, *(each for child in found for each in _children(child))]


def _command(process: int) -> str:
    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    return "node" if any("flower_node" in word for word in words) else "site"


class _SitePeaks:
    """Watches the peak memory of the processes `fedllm site` that this process starts. peaks: by their file."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _SitePeaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            for process in _children(os.getpid()):
                with contextlib.suppress(OSError, StopIteration):  # it has ended
                    words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
                    if "site" in words and "fedllm" in words:
                        name = Path(words[words.index("site") + 1]).parent.name
                        self.peaks[name] = max(self.peaks.get(name, 0), _peak_bytes(process))


def rounds(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """Seconds of each round, deployed and simulated in turn, on three sites of the quickstart."""
    make_trial(folder, 3)
    names = [site.name for site in read_server_folder(folder / "server").sites]
    together = folder / "train.csv"
    recipe = folder / "server" / "recipe.yaml"
    together.write_text(_together([folder / name / TRAINING for name in names], names))
    found: dict[str, list[float]] = {"deployed": [], "simulated": []}
    sent: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    for repeat in range(repeats):
        overrides = [f"federation.rounds={count}", "eval.every=1000"]
        deployed = folder / f"deployed-{repeat}"
        with _SitePeaks() as watched:
            run_trial(folder, [*overrides, f"run.dir={deployed}"])
        peaks = watched.peaks
        lines = [json.loads(line) for line in (deployed / "metrics.jsonl").read_text().splitlines()]
        found["deployed"] += [line["seconds"] for line in lines[1:]]
        sent["deployed_bytes"] = {name: lines[-1][name] for name in ("bytes_down", "bytes_up")}
        own = [f"data.train={together}", f"data.validation={folder / 'server' / VALIDATION}"]
        simulated = [*overrides, *own, f"run.dir={folder}/simulated-{repeat}"]
        ours = run_recipe(recipe, simulated).metrics
        found["simulated"] += [line["seconds"] for line in ours[1:]]
        sent["simulated_bytes"] = {name: ours[-1][name] for name in ("bytes_down", "bytes_up")}
    medians = {name: statistics.median(values) for name, values in found.items()}
    overhead = medians["deployed"] - medians["simulated"]
    return {"seconds": found, "median": medians, "overhead": overhead, **sent, "peak_bytes_of_sites": peaks}


def _together(files: Sequence[Path], names: Sequence[str]) -> str:
    """The sites' files as one, with the column `site`."""
    lines = ["text,label,site"]
    for path, name in zip(files, names, strict=True):
        lines += [f"{line},{name}" for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures one part and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("transport", "rounds", "waiting"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=500_000_000)
    parser.add_argument("--idle", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / arguments.part
        if arguments.part == "transport":
            sizes = [size for size in SIZES if size < arguments.largest] + [arguments.largest]
            found = transport(folder, sizes, arguments.repeats, arguments.idle)
        elif arguments.part == "rounds":
            found = rounds(folder, arguments.rounds, arguments.repeats)
        else:
            found = waiting(folder, arguments.idle)
    arguments.out.write_text(json.dumps({arguments.part: found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
