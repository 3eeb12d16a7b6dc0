"""What a round costs in memory and time for bases and federations that do not fit this machine.

python benchmarks/scaling_model.py     # writes the tables of docs/scaling.md, from here and from scale/sweep.json

Plain arithmetic on sizes. The memory terms are tested against the library's own tensors (tests/test_scaling.py) and
measured by benchmarks/scaling_sweep.py; what is assumed of hardware is in `Gpu` and `Host`, and nowhere else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedllm.algorithms import Algorithm, load_algorithm
from fedllm.algorithms.base import RoundInfo, Rows, State
from fedllm.blocks import BlockPartition
from fedllm.costs import stored_values

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "scaling.md"
SWEEP = HERE / "scale" / "sweep.json"
GIB = 2**30


@dataclass(frozen=True)
class Base:
    """A decoder of the Llama family, frozen, with LoRA on query and value and a head of two classes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def kv(self) -> int:
        """Width of key and of value."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """Values of the frozen matrices that every token passes through."""
        return self.layers * (2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.intermediate)

    @property
    def frozen(self) -> int:
        """All frozen values: the matrices, the norms and the embeddings."""
        return self.matrices + (2 * self.layers + 1) * self.hidden + self.vocabulary * self.hidden

    def adapter(self, rank: int) -> int:
        """Trainable values of a layer."""
        return rank * (3 * self.hidden + self.kv)

    def trainable(self, rank: int) -> int:
        """d."""
        return self.layers * self.adapter(rank) + 2 * self.hidden

    def saved(self, tokens: int, rank: int, cohort: int, bfloat16: bool) -> int:
        """Bytes that the forward of all layers keeps for the backward: no inputs of frozen layers, whose weights have
        no gradient. In bfloat16 (weights and autocast) the norms stay in float32, and the adapters are cast."""
        h, i, kv = self.hidden, self.intermediate, self.kv
        if bfloat16:
            per_token = 2 * (8 * h + 2 * kv + 3 * i + 2 * rank) + 4 * (self.heads + 2)
            return self.layers * (tokens * per_token + 2 * cohort * self.adapter(rank))
        return self.layers * tokens * 4 * (5 * h + 2 * kv + 3 * i + 2 * rank + self.heads + 2)

    def working(self, tokens: int, bfloat16: bool) -> int:
        """Bytes of the gradients in the one feed-forward block whose backward is under way."""
        return tokens * 3 * self.intermediate * (2 if bfloat16 else 4)

    def operations(self, length: int, rank: int) -> float:
        """Floating-point operations a token of a local step: a frozen value 2 forward and 2 backward, an adapter's
        value 2 and 4, attention over `length` tokens 4 and 8 a channel of a layer."""
        attention = 12 * self.layers * self.hidden * length
        return 4 * self.matrices + 6 * self.layers * self.adapter(rank) + attention


def row_vectors(alg: Algorithm) -> dict[str, int]:
    """How many float32 matrices [C, d] a cohort holds: while it steps, and while its uploads are reduced.

    step: the local state, what the clients brought, the gradient, and two temporaries of the step. reduce: the local
    state, uploads and kept rows that are not the local ones, and for one upload at a time the accepted rows, their
    float64 and its weighted copy.
    """
    info = RoundInfo(0, 1, 1, 1, 1, 1, BlockPartition.elementwise(1))
    x, one = torch.zeros(1, 1), torch.ones(1, 1)
    server, kept = alg.init_server(x[0], info), alg.init_clients(x, info)
    local = alg.begin(x, server, kept, info)
    alg.step(local, x.clone(), 1, one, info)
    upload, state = alg.end(local, x, server, kept, Rows(one, one, one.bool()), info)
    return {"step": _count(local) + _count(kept) + 3, "reduce": _count(local | upload | state) + 5}


def _count(state: State) -> int:
    return len({value.data_ptr() for value in state.values()})


@dataclass(frozen=True)
class Gpu:
    """An H100 SXM as NVIDIA's data sheet has it (an H200 differs in memory: 141 GB, 4.8 TB/s), and the share of its
    peak that is assumed to be reached."""

    memory: float = 80e9  # bytes
    operations: float = 989e12  # dense bfloat16 a second
    bandwidth: float = 3.35e12  # bytes a second
    link: float = 50e9  # bytes a second to the host, each way; PCIe 5 x16: 64e9
    efficiency: float = 0.4  # of the peak operations; 0.3 to 0.5 are usual for training without fused kernels


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs. messages: bytes a second that rank 0 packs, sends or receives, and unpacks, which
    it does with one process after the other."""

    memory: float = 2e12
    messages: float = 1e9


@dataclass(frozen=True)
class Work:
    """A federation: N clients, S a round, K steps of `batch` samples of `length` tokens, adapters of `rank`, `slices`
    a batch, `cohort` clients at once on each of `gpus`."""

    base: Base
    algorithm: str = "fadamgc"
    clients: int = 10_000
    sampled: int = 80
    steps: int = 10
    batch: int = 16
    length: int = 256
    rank: int = 16
    gpus: int = 8
    cohort: int = 1
    slices: int = 1
    weight_bytes: float = 2.0  # of a frozen value; 4-bit nf4 with its scales: 0.5625

    @property
    def dim(self) -> int:
        """d."""
        return self.base.trainable(self.rank)

    @property
    def rule(self) -> Algorithm:
        """The algorithm at its defaults."""
        return load_algorithm(self.algorithm)

    @property
    def state(self) -> int:
        """Bytes that one client keeps between rounds."""
        info = RoundInfo(0, 1, self.clients, self.sampled, self.sampled, self.steps, BlockPartition.elementwise(1))
        return 4 * stored_values(self.rule, info, self.dim)

    def gpu_bytes(self) -> dict[str, float]:
        """What a GPU holds at its fullest: frozen weights, rows of the cohort, activations of one slice."""
        tokens = self.cohort * self.batch * self.length // self.slices
        vectors = row_vectors(self.rule)
        return {
            "base": self.base.frozen * self.weight_bytes,
            "rows": 4 * self.dim * self.cohort * max(vectors.values()),
            "activations": self.base.saved(tokens, self.rank, self.cohort, bfloat16=True)
            + self.base.working(tokens, bfloat16=True),
        }

    def largest_cohort(self, gpu: Gpu) -> int:
        """Clients that fit a GPU at once, in one slice, with a tenth of it left free; 0 where one does not."""
        one = self.gpu_bytes()
        room = 0.9 * gpu.memory - one["base"]
        return int(room / ((one["rows"] + one["activations"]) / self.cohort))

    def host_bytes(self) -> dict[str, float]:
        """What rank 0 holds once every client has been trained: state of N, and of S twice as a round ends."""
        return {"state of all clients": self.clients * self.state, "of a round": 2 * self.sampled * self.state}

    def messages(self) -> float:
        """Bytes between rank 0 and the others in a round: x and the server's vectors down and each client's state both
        ways, and the sums up (float64: uploads, tracked ones, and two to four of the drift)."""
        alg, others = self.rule, self.gpus - 1
        down = 4 * self.dim * (1 + len(alg.server_vectors()))
        up = 8 * self.dim * (len(alg.uploads()) + len(alg.tracked_uploads()) + (4 if alg.moment else 2))
        return others * (down + up) + 2 * self.state * self.sampled * others / self.gpus

    def seconds(self, gpu: Gpu, host: Host) -> dict[str, float]:
        """Seconds of a round by what they go to. arithmetic: of the algorithm, each row vector read and written twice a
        step. state: between host and GPU."""
        mine = -(-self.sampled // self.gpus)
        tokens = mine * self.steps * self.batch * self.length
        vectors = row_vectors(self.rule)["step"]
        return {
            "model": tokens * self.base.operations(self.length, self.rank) / (gpu.operations * gpu.efficiency),
            "arithmetic": mine * self.steps * 4 * vectors * 4 * self.dim / gpu.bandwidth,
            "state": 2 * mine * self.state / gpu.link,
            "messages": self.messages() / host.messages,
        }


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
            sliced = Work(base, weight_bytes=weight_bytes, slices=4)
            rows.append(
                [
                    f"{base.name}, {name}",
                    f"{work.dim / 1e6:.1f}",
                    *(f"{value / GIB:.1f}" for value in parts.values()),
                    f"{work.largest_cohort(Gpu())}",
                    f"{sliced.largest_cohort(Gpu())}",
                    f"{work.largest_cohort(Gpu(memory=141e9))}",
                ]
            )
    heads = ["base", "d, millions", "base GiB", "rows GiB a client", "activations GiB a client"]
    return table([*heads, "clients that fit 80 GB", "in 4 slices", "clients that fit 141 GB"], rows)


def round_table() -> str:
    """Seconds of a round, and memory of the host, by algorithm."""
    rows = []
    for algorithm in ALGORITHMS:
        work = Work(LLAMA_7B, algorithm)
        seconds = work.seconds(Gpu(), Host())
        state = work.host_bytes()["state of all clients"]
        rows.append(
            [
                algorithm,
                *(f"{value:.2g}" if value < 1 else f"{value:.1f}" for value in seconds.values()),
                f"{sum(seconds.values()):.0f}",
                f"{seconds['messages'] / sum(seconds.values()):.0%}",
                f"{work.state / 1e6:.0f}",
                f"{state / 1e9:,.0f}",
            ]
        )
    heads = ["algorithm", "model s", "arithmetic s", "state s", "messages s", "round s", "messages, share"]
    return table([*heads, "state a client, MB", "state of 10,000, GB"], rows)


def check_tables(sweep: dict[str, Any]) -> str:
    """Predicted against measured, from scale/sweep.json."""
    rate = max(point["operations"] / min(point["seconds"]) for point in sweep["speed"])
    speed = [
        [
            point["name"],
            f"{point['frozen'] / 1e6:.1f}",
            f"{point['operations'] / 1e9:.1f}",
            f"{point['operations'] / rate:.2f}",
            f"{min(point['seconds']):.2f}",
            f"{point['operations'] / min(point['seconds']) / 1e9:.1f}",
            f"{point['operations'] / min(point['seconds']) / sweep['product_rate']:.2f}",
        ]
        for point in sweep["speed"]
    ]
    memory = [
        [
            str(point["cohort"]),
            f"{point['rows'] / 2**20:.0f}",
            f"{point['activations'] / 2**20:.0f}",
            f"{(point['rows'] + point['activations']) / 2**20:.0f}",
            f"{point['measured'] / 2**20:.0f}",
            f"{point['measured'] / (point['rows'] + point['activations']):.2f}",
        ]
        for point in sweep["memory"]
    ]
    heads = ["hidden x layers", "frozen, millions", "Gop", "predicted s", "measured s", "Gop/s", "of a plain product"]
    return "\n\n".join(
        (
            table(heads, speed),
            table(["cohort", "rows MiB", "activations MiB", "predicted MiB", "measured MiB", "ratio"], memory),
            table(
                ["message of", "MB/s"],
                [
                    [f"{point['bytes'] / 1e6:.0f} MB", f"{point['bytes'] / point['seconds'] / 1e6:,.0f}"]
                    for point in sweep["messages"]
                ],
            ),
        )
    )


def filled(text: str) -> str:
    """The page with its tables, each between `<!-- name -->` and `<!-- end -->`, made anew."""
    tables = {
        "gpu": gpu_table(),
        "round": round_table(),
        "checks": check_tables(json.loads(SWEEP.read_text(encoding="utf-8"))),
    }
    for name, made in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{made}\n\n\g<2>", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
