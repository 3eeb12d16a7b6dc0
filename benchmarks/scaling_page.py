"""The tables of docs/scaling.md, from the model and from what was measured.

python benchmarks/scaling_page.py     # writes them into the page
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaling_model import Base, Gpu, Host, Work

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "scaling.md"
SWEEP = HERE / "scale" / "sweep.json"
GIB, MIB = 2**30, 2**20

LLAMA_7B = Base("Llama-2 7B", 4096, 11008, 32, 32, 32, 32000)
BASES = (
    Base("1.1B (TinyLlama)", 2048, 5632, 22, 32, 4, 32000),
    Base("3B (Llama-3.2)", 3072, 8192, 28, 24, 8, 128256),
    LLAMA_7B,
)
ALGORITHMS = ("fedavg", "fedadamw", "scaffold", "fadamgc")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu_table() -> str:
    """Memory of a GPU by base and precision, at cohorts of one client."""
    rows = []
    for base in BASES:
        for name, weight_bytes in (("bfloat16", 2.0), ("4 bit", 0.5625)):
            work = Work(base, weight_bytes=weight_bytes)
            parts = work.gpu_bytes()
            sliced, checkpointed = replace(work, slices=4), replace(work, checkpointing=True)
            rows.append(
                [
                    f"{base.name}, {name}",
                    f"{work.dim / 1e6:.1f}",
                    *(f"{value / GIB:.1f}" for value in parts.values()),
                    f"{work.largest_cohort(Gpu())}",
                    f"{sliced.largest_cohort(Gpu())}",
                    f"{checkpointed.largest_cohort(Gpu())}",
                    f"{work.largest_cohort(Gpu(memory=141e9))}",
                ]
            )
    heads = ["base", "d, millions", "base GiB", "rows GiB a client", "activations GiB a client"]
    return table([*heads, "clients that fit 80 GB", "in 4 slices", "checkpointed", "clients that fit 141 GB"], rows)


def round_table() -> str:
    """Seconds of a round, and files of the clients, by algorithm."""
    rows = []
    for algorithm in ALGORITHMS:
        work = Work(LLAMA_7B, algorithm)
        seconds = work.seconds(Gpu(), Host())
        rows.append(
            [
                algorithm,
                *(f"{value:.2g}" if value < 1 else f"{value:.1f}" for value in seconds.values()),
                f"{sum(seconds.values()):.0f}",
                f"{seconds['messages'] / sum(seconds.values()):.0%}",
                f"{work.state / 1e6:.0f}",
                f"{work.disk / 1e9:,.0f}",
            ]
        )
    heads = ["algorithm", "model s", "arithmetic s", "state s", "messages s", "round s", "messages, share"]
    return table([*heads, "state a client, MB", "files of 10,000, GB"], rows)


def speed_table(points: list[dict[str, Any]], product_rate: float) -> str:
    """Seconds of a step: predicted by the operations and the rate of the middle size, and measured."""
    rates = [point["operations"] / min(point["seconds"]) for point in points]
    middle = len(points) // 2
    rows = [
        [
            point["name"],
            f"{point['frozen'] / 1e6:.1f}",
            f"{point['operations'] / 1e9:.1f}",
            "(taken from it)" if place == middle else f"{point['operations'] / rates[middle]:.2f}",
            f"{min(point['seconds']):.2f}",
            f"{rate / product_rate:.0%}",
        ]
        for place, (point, rate) in enumerate(zip(points, rates, strict=True))
    ]
    heads = ["hidden x layers", "frozen, millions", "operations, billions", "predicted s", "measured s"]
    return table([*heads, "of a plain product's rate"], rows)


def memory_table(points: list[dict[str, Any]]) -> str:
    """Peak memory of a round beyond what was there before it."""
    rows = []
    for point in points:
        predicted, measured = point["rows"] + point["activations"], point["measured"]
        parts = [f"{value / MIB:.0f}" for value in (point["rows"], point["activations"], predicted, measured)]
        name = f"{point['layers']}{', checkpointed' if point['checkpointing'] else ''}"
        rows.append([name, str(point["cohort"]), *parts, f"{measured / predicted:.2f}", f"{point['seconds']:.1f}"])
    heads = ["layers", "cohort", "rows MiB", "activations MiB", "predicted MiB", "measured MiB", "ratio", "CPU s"]
    return table(heads, rows)


def rate_table(messages: list[dict[str, Any]], files: list[dict[str, Any]]) -> str:
    """Bytes a second of a message, sent and received, and of a client's file, written and read."""
    rates = [[f"{point['bytes'] / point['seconds'] / 1e6:,.0f}" for point in kind] for kind in (messages, files)]
    sizes = [f"{point['bytes'] / 1e6:.0f}" for point in messages]
    return table(["size, MB", "message, MB/s", "file, MB/s"], [list(row) for row in zip(sizes, *rates, strict=True)])


def filled(text: str) -> str:
    """The page with its tables, each between `<!-- name -->` and `<!-- end -->`, made anew."""
    sweep = json.loads(SWEEP.read_text(encoding="utf-8"))
    tables = {
        "gpu": gpu_table(),
        "round": round_table(),
        "speed": speed_table(sweep["speed"], sweep["product_rate"]),
        "memory": memory_table(sweep["memory"]),
        "rates": rate_table(sweep["messages"], sweep["files"]),
    }
    for name, made in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{made}\n\n\g<2>", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
