"""What a round costs in memory and time for bases and federations that do not fit this machine.

Plain arithmetic on sizes; benchmarks/scaling_page.py makes the tables of docs/scaling.md with it. The memory terms are
tested against the library's own tensors (tests/test_scaling.py) and measured by benchmarks/scaling_sweep.py; what is
assumed of hardware is in `Gpu` and `Host`, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedllm.algorithms import Algorithm, load_algorithm
from fedllm.algorithms.base import RoundInfo, Vectors
from fedllm.blocks import BlockPartition
from fedllm.costs import row_vectors, stored_values


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
            per_token = 2 * (7 * h + 2 * kv + 3 * i + 2 * rank) + 4 * (self.heads + 2)
            return self.layers * (tokens * per_token + 2 * cohort * self.adapter(rank))
        return self.layers * tokens * 4 * (5 * h + 2 * kv + 3 * i + 2 * rank + self.heads + 2)

    def inputs(self, tokens: int, bfloat16: bool) -> int:
        """Bytes that the forward of all layers keeps with gradient checkpointing."""
        return self.layers * tokens * self.hidden * (2 if bfloat16 else 4)

    def working(self, tokens: int, bfloat16: bool) -> int:
        """Bytes of the gradients in the one feed-forward block whose backward is under way."""
        return tokens * 3 * self.intermediate * (2 if bfloat16 else 4)

    def operations(self, length: int, rank: int) -> float:
        """Floating-point operations a token of a local step: a frozen value 2 forward and 2 backward, an adapter's
        value 2 and 4, attention over `length` tokens 4 and 8 a channel of a layer."""
        attention = 12 * self.layers * self.hidden * length
        return 4 * self.matrices + 6 * self.layers * self.adapter(rank) + attention


def _long(vectors: Vectors) -> int:
    """How many of them have d values; those of one value a block are too short to count."""
    return sum(of == "d" for of in vectors.values())


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
    """The machine around the GPUs. messages: bytes a second that rank 0 sends or receives, with one process after the
    other. files: bytes a second of clients' vectors that a process both reads and writes, with digests, where
    the system's file cache holds them. Here, on one core, they were 1.0e9 and 0.35e9 for 100 MB."""

    messages: float = 1e9
    files: float = 0.33e9


@dataclass(frozen=True)
class Work:
    """A federation: N clients, S a round, K steps of `batch` samples of `length` tokens, adapters of `rank`, `slices`
    a batch, `cohort` clients at once on each of `gpus`, with gradient `checkpointing` or without."""

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
    checkpointing: bool = False
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
        kept = self.base.saved(tokens, self.rank, self.cohort, bfloat16=True)
        if self.checkpointing:  # of one layer, beside the inputs of all
            kept = self.base.inputs(tokens, bfloat16=True) + kept // self.base.layers
        return {
            "base": self.base.frozen * self.weight_bytes,
            "rows": 4 * self.dim * self.cohort * max(vectors.values()),
            "activations": kept + self.base.working(tokens, bfloat16=True),
        }

    def largest_cohort(self, gpu: Gpu) -> int:
        """Clients that fit a GPU at once, in one slice, with a tenth of it left free; 0 where one does not."""
        one = self.gpu_bytes()
        room = 0.9 * gpu.memory - one["base"]
        return int(room / ((one["rows"] + one["activations"]) / self.cohort))

    @property
    def disk(self) -> int:
        """Bytes of all clients' files once every one has been trained; a checkpoint's are the same files."""
        return self.clients * self.state

    def messages(self) -> float:
        """Bytes between rank 0 and the others, on one machine, in a round: x and the server's vectors down, and the
        sums up (float64: uploads, tracked ones, and two to four of the drift)."""
        alg, others = self.rule, self.gpus - 1
        down = 4 * self.dim * (1 + _long(alg.server_vectors()))
        up = 8 * self.dim * (_long(alg.uploads()) + _long(alg.tracked_uploads()) + (4 if alg.moment else 2))
        return float(others * (down + up))

    def seconds(self, gpu: Gpu, host: Host) -> dict[str, float]:
        """Seconds of a round by what they go to. arithmetic: of the algorithm, each row vector read and written twice a
        step. state: of its clients, between file and GPU."""
        mine = -(-self.sampled // self.gpus)
        tokens = mine * self.steps * self.batch * self.length
        vectors = row_vectors(self.rule)["step"]
        return {
            "model": tokens * self.base.operations(self.length, self.rank) / (gpu.operations * gpu.efficiency),
            "arithmetic": mine * self.steps * 4 * vectors * 4 * self.dim / gpu.bandwidth,
            "state": mine * self.state * (1 / host.files + 2 / gpu.link),
            "messages": self.messages() / host.messages,
        }
