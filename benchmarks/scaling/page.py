"""The tables of docs/explanation/scaling.md, from the model and from results/scaling/validate_model.json.

python -m benchmarks.scaling.page     # writes them into the page
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scaling.model import Base, Gpu, Host, Work

BENCHMARKS = Path(__file__).resolve().parents[1]
PAGE = BENCHMARKS.parent / "docs" / "explanation" / "scaling.md"
MEASURED = BENCHMARKS / "results" / "scaling" / "validate_model.json"
GIB, MIB = 2**30, 2**20

LLAMA_7B = Base("Llama-2 7B", 4096, 11008, 32, 32, 32, 32000)
BASES = (
    Base("1.1B (TinyLlama)", 2048, 5632, 22, 32, 4, 32000),
    Base("3B (Llama-3.2)", 3072, 8192, 28, 24, 8, 128256),
    LLAMA_7B,
)
ALGORITHMS = ("fedavg", "fedadamw", "scaffold", "fadamgc")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu_table() -> str:
    """Memory of a GPU by base and precision, and the clients that fit on it together."""
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
                    f"{work.most_stacked(Gpu())}",
                    f"{sliced.most_stacked(Gpu())}",
                    f"{checkpointed.most_stacked(Gpu())}",
                    f"{work.most_stacked(Gpu(memory=141e9))}",
                ]
            )
    heads = ["base", "d, millions", "base, GiB", "rows, GiB per client", "activations, GiB per client"]
    return table(
        [*heads, "clients in 80 GB", "with 4 slices", "with gradient checkpointing", "clients in 141 GB"], rows
    )


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
                f"{work.messages() / 1e6:.0f}",
                f"{work.state / 1e6:.0f}",
                f"{work.disk / 1e9:,.0f}",
            ]
        )
    heads = [
        "algorithm",
        "model, s",
        "arithmetic, s",
        "state, s",
        "messages, s",
        "round, s",
        "messages per process, MB",
    ]
    return table([*heads, "state per client, MB", "files of 10,000 clients, GB"], rows)


def speed_table(points: list[dict[str, Any]], product_rate: float) -> str:
    """Seconds of a step, measured, and predicted from the operations and the middle size's operations per second."""
    rates = [point["operations"] / min(point["seconds"]) for point in points]
    middle = len(points) // 2
    rows = [
        [
            point["name"],
            f"{point['frozen'] / 1e6:.1f}",
            f"{point['operations'] / 1e9:.1f}",
            "(reference)" if place == middle else f"{point['operations'] / rates[middle]:.2f}",
            f"{min(point['seconds']):.2f}",
            f"{rate / product_rate:.0%}",
        ]
        for place, (point, rate) in enumerate(zip(points, rates, strict=True))
    ]
    heads = ["hidden x layers", "frozen, millions", "operations, billions", "predicted, s", "measured, s"]
    return table([*heads, "% of a plain product's speed"], rows)


def memory_table(points: list[dict[str, Any]]) -> str:
    """Peak memory of a round, less the memory before it."""
    rows = []
    for point in points:
        predicted, measured = point["rows"] + point["activations"], point["measured"]
        parts = [f"{value / MIB:.0f}" for value in (point["rows"], point["activations"], predicted, measured)]
        name = f"{point['layers']}{', gradient checkpointing' if point['checkpointing'] else ''}"
        rows.append(
            [name, str(point["stacked_clients"]), *parts, f"{measured / predicted:.2f}", f"{point['seconds']:.1f}"]
        )
    heads = ["layers", "stacked clients", "rows, MiB", "activations, MiB", "predicted, MiB"]
    return table([*heads, "measured, MiB", "ratio", "CPU s"], rows)


def rate_table(messages: list[dict[str, Any]], files: list[dict[str, Any]]) -> str:
    """Bytes per second that a process receives of a sum, and of a client's file, written and read."""
    rates = [[f"{point['bytes'] / point['seconds'] / 1e6:,.0f}" for point in kind] for kind in (messages, files)]
    sizes = [f"{point['bytes'] / 1e6:.0f}" for point in messages]
    return table(["size, MB", "message, MB/s", "file, MB/s"], [list(row) for row in zip(sizes, *rates, strict=True)])


def filled(text: str) -> str:
    """The page with new tables; each stands between `<!-- name -->` and `<!-- end -->`."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    tables = {
        "gpu": gpu_table(),
        "round": round_table(),
        "speed": speed_table(measured["speed"], measured["product_rate"]),
        "memory": memory_table(measured["memory"]),
        "rates": rate_table(measured["messages"], measured["files"]),
    }
    for name, made in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{made}\n\n\g<2>", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
