"""A model of a round's memory and time, for base models and federations that are too large to measure here.

It is plain arithmetic on sizes. page.py makes the tables of docs/explanation/scaling.md with it. The memory terms are
compared with the library's own tensors by tests/benchmarks/test_scaling.py, and with measurements by validate_model.py.
All assumptions on hardware are in `Gpu` and `Host`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedllm.algorithms import Algorithm, load_algorithm
from fedllm.algorithms.base import RoundInfo, Vectors
from fedllm.blocks import BlockPartition
from fedllm.federation.costs import row_vectors, stored_values


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
        """Values of the frozen matrices that multiply every token."""
        return self.layers * (2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.intermediate)

    @property
    def frozen(self) -> int:
        """All frozen values: the matrices, the norms and the embeddings."""
        return self.matrices + (2 * self.layers + 1) * self.hidden + self.vocabulary * self.hidden

    def adapter(self, rank: int) -> int:
        """Trainable values per layer."""
        return rank * (3 * self.hidden + self.kv)

    def trainable(self, rank: int) -> int:
        """d."""
        return self.layers * self.adapter(rank) + 2 * self.hidden

    def saved(self, tokens: int, rank: int, clients: int, bfloat16: bool) -> int:
        """Bytes that the forward pass of all layers saves for the backward pass. Frozen layers save no inputs, because
        their weights have no gradient. In bfloat16 (weights and autocast) norms stay in float32 and adapters are cast.
        """
        h, i, kv = self.hidden, self.intermediate, self.kv
        if bfloat16:
            per_token = 2 * (7 * h + 2 * kv + 3 * i + 2 * rank) + 4 * (self.heads + 2)
            return self.layers * (tokens * per_token + 2 * clients * self.adapter(rank))
        return self.layers * tokens * 4 * (5 * h + 2 * kv + 3 * i + 2 * rank + self.heads + 2)

    def inputs(self, tokens: int, bfloat16: bool) -> int:
        """Bytes that the forward pass of all layers saves under gradient checkpointing."""
        return self.layers * tokens * self.hidden * (2 if bfloat16 else 4)

    def working(self, tokens: int, bfloat16: bool) -> int:
        """Bytes of the gradients inside the one feed-forward block whose backward pass runs."""
        return tokens * 3 * self.intermediate * (2 if bfloat16 else 4)

    def operations(self, length: int, rank: int) -> float:
        """Floating-point operations per token of a local step. A frozen value takes 2 in the forward pass and 2 in the
        backward pass, an adapter's value 2 and 4, attention over `length` tokens 4 and 8 per channel and layer."""
        attention = 12 * self.layers * self.hidden * length
        return 4 * self.matrices + 6 * self.layers * self.adapter(rank) + attention


def _long(vectors: Vectors) -> int:
    """Number of vectors with d values. Those with one value per block are too short to count."""
    return sum(of == "d" for of in vectors.values())


def received(algorithm: str, dim: int, processes: int) -> float:
    """Bytes that a process receives per round, in float64, with one part per process. Of the sums of uploads and of
    tracked uploads: its run of coordinates of every other part, then the joined runs of the other processes. Of the
    two sums for the spread of a second moment: its run of every other part. Every process computes x itself."""
    rule = load_algorithm(algorithm)
    sums = 2 * (_long(rule.uploads()) + _long(rule.tracked_uploads()))
    return 8 * dim * (sums + (2 if rule.moment else 0)) * (processes - 1) / processes


@dataclass(frozen=True)
class Gpu:
    """An H100 SXM by NVIDIA's data sheet (an H200 differs in memory: 141 GB, 4.8 TB/s), and the fraction of its peak
    that is assumed to be reached."""

    memory: float = 80e9  # bytes
    operations: float = 989e12  # dense bfloat16 per second
    bandwidth: float = 3.35e12  # bytes per second
    link: float = 50e9  # bytes per second to the host and to other GPUs, each way; PCIe 5 x16: 64e9, NVLink: 450e9
    efficiency: float = 0.4  # of the peak operations; 0.3 to 0.5 are usual for training without fused kernels


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs. files: bytes per second of clients' vectors that a process writes, digests and reads
    again from the system's file cache. Measured on one core with 100 MB: 0.35e9."""

    files: float = 0.33e9


@dataclass(frozen=True)
class Work:
    """A federation: `clients` N, `sampled` S per round, `steps` K of `batch` samples of `length` tokens, adapters of
    `rank`, a batch in `slices`, `stacked` clients together on each of `gpus`, `checkpointing`: of gradients or not."""

    base: Base
    algorithm: str = "fadamgc"
    clients: int = 10_000
    sampled: int = 80
    steps: int = 10
    batch: int = 16
    length: int = 256
    rank: int = 16
    gpus: int = 8
    stacked: int = 1
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
        """A GPU's peak: frozen weights, rows of the stacked clients, activations of one slice."""
        tokens = self.stacked * self.batch * self.length // self.slices
        vectors = row_vectors(self.rule)
        saved = self.base.saved(tokens, self.rank, self.stacked, bfloat16=True)
        if self.checkpointing:  # the inputs of all layers, and one layer's activations
            saved = self.base.inputs(tokens, bfloat16=True) + saved // self.base.layers
        return {
            "base": self.base.frozen * self.weight_bytes,
            "rows": 4 * self.dim * self.stacked * max(vectors.values()),
            "activations": saved + self.base.working(tokens, bfloat16=True),
        }

    def most_stacked(self, gpu: Gpu) -> int:
        """Clients that fit on a GPU together, with a tenth of it left free; 0 where one client does not fit."""
        one = self.gpu_bytes()
        room = 0.9 * gpu.memory - one["base"]
        return int(room / ((one["rows"] + one["activations"]) / self.stacked))

    @property
    def disk(self) -> int:
        """Bytes of all clients' files after every client has been trained. A checkpoint links the same files."""
        return self.clients * self.state

    def messages(self) -> float:
        """Bytes that a process receives per round."""
        return received(self.algorithm, self.dim, self.gpus)

    def seconds(self, gpu: Gpu, host: Host) -> dict[str, float]:
        """Seconds of a round by part. model: forward, backward. arithmetic: the algorithm's, each row vector read and
        written twice per step. state: clients' vectors between file and GPU. messages: between processes."""
        mine = -(-self.sampled // self.gpus)
        tokens = mine * self.steps * self.batch * self.length
        vectors = row_vectors(self.rule)["step"]
        return {
            "model": tokens * self.base.operations(self.length, self.rank) / (gpu.operations * gpu.efficiency),
            "arithmetic": mine * self.steps * 4 * vectors * 4 * self.dim / gpu.bandwidth,
            "state": mine * self.state * (1 / host.files + 2 / gpu.link),
            "messages": self.messages() / gpu.link,
        }
