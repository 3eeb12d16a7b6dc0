"""Measures what benchmarks/scaling/model.py predicts: seconds from operations, memory of a step, messages, files.

python -m benchmarks.scaling.validate_model   # writes results/scaling/validate_model.json; three CPU minutes

The models are random Llamas, since only sizes matter. Seconds are CPU seconds of the process, the fastest of the
repeats; the sizes alternate. Memory is the peak resident size of a new process, less its size before the round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from benchmarks.scaling.model import Base
from benchmarks.scaling.page import MEASURED
from fedllm.algorithms import load_algorithm
from fedllm.data.client_batches import ClientBatches
from fedllm.data.tokenization import Tokens
from fedllm.distributed.collectives import Collectives
from fedllm.experiment.records import versions
from fedllm.federation.client_states import ClientFiles
from fedllm.federation.costs import row_vectors
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round
from fedllm.federation.setup import Setup
from fedllm.federation.state import blank
from fedllm.models.loading import Backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem

SIZES = ((128, 4), (256, 4), (512, 4), (768, 6), (1024, 8))
ROUNDS = ((4, 1, False), (4, 4, False), (4, 16, False), (12, 4, False), (12, 4, True))  # layers, clients, checkpointing
SHAPE = {"batch": 4, "length": 64}
RANK, REPEATS = 16, 3


def base(hidden: int, layers: int) -> Base:
    """A small decoder with the proportions of Llama-2 7B."""
    return Base(f"{hidden} x {layers}", hidden, hidden * 43 // 16, layers, hidden // 64, hidden // 64, 1000)


def problem(
    base: Base,
    rank: int,
    clients: int,
    batch: int,
    length: int,
    *,
    bfloat16: bool = False,
    checkpointing: bool = False,
) -> LoraProblem:
    """Clients with one batch each of tokens, all samples of one length, on a random model."""
    config = LlamaConfig(
        hidden_size=base.hidden,
        intermediate_size=base.intermediate,
        num_hidden_layers=base.layers,
        num_attention_heads=base.heads,
        num_key_value_heads=base.kv_heads,
        vocab_size=base.vocabulary,
        max_position_embeddings=4096,
        pad_token_id=0,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config).requires_grad_(False)
    if bfloat16:
        model = model.to(torch.bfloat16)
    no_tokenizer = cast(PreTrainedTokenizerBase, None)
    adapted = attach_lora(
        Backbone(model, no_tokenizer, base.name, "hub", ("score",), "SEQ_CLS", None), LoraSettings(rank=rank)
    )
    rows = clients * batch
    ids = torch.arange(rows * length, dtype=torch.int32) % (base.vocabulary - 1) + 1
    tokens = Tokens(ids, None, torch.arange(0, rows * length + 1, length), torch.arange(rows) % 2)
    parts = np.split(np.arange(rows), clients)
    batches = ClientBatches(parts, batch_size=batch, epochs=1, steps=None, seed=0)
    low = torch.bfloat16 if bfloat16 else None
    settings = EngineSettings(low, slices=1, checkpointing=checkpointing)
    return LoraProblem(adapted, tokens, batches, partial(F.cross_entropy, reduction="none"), settings)


def main() -> None:
    if os.environ.get("RANK"):
        exchange(*map(int, sys.argv[1:]))
        return
    if sys.argv[1:]:
        print(json.dumps(memory(*json.loads(sys.argv[1]))))
        return
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, where there is this call (Linux)
    before, seconds = product_rate(), speed()
    found = {
        "versions": versions(),
        "shape": SHAPE,
        "product_rate": max(before, product_rate()),
        "speed": seconds,
        "memory": [_fresh(*which) for which in ROUNDS],
        "messages": [message(size) for size in (1_000_000, 10_000_000, 100_000_000)],
        "files": [client_file(size) for size in (1_000_000, 10_000_000, 100_000_000)],
    }
    MEASURED.write_text(json.dumps(found, indent=1) + "\n")


def product_rate() -> float:
    """Operations per second of a plain float32 product [1024, 2048] x [2048, 2048], the best of ten."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    return 2 * 1024 * 2048 * 2048 / min(_cpu(lambda: a @ b) for _ in range(10))


def speed() -> list[dict[str, Any]]:
    """Seconds of one local step of two clients, by size of the model."""
    bases = [base(*size) for size in SIZES]
    problems = [problem(found, RANK, 2, **SHAPE) for found in bases]
    rows = [found.initial().expand(2, -1).clone() for found in problems]
    seconds: list[list[float]] = [[] for _ in bases]
    for _ in range(REPEATS + 1):
        for place, found in enumerate(problems):
            seconds[place].append(_cpu(partial(found.loss_and_gradient, rows[place], [0, 1], 0, 0)))
    tokens = 2 * SHAPE["batch"] * SHAPE["length"]
    return [
        {
            "name": found.name,
            "frozen": found.frozen,
            "operations": tokens * found.operations(SHAPE["length"], RANK),
            "seconds": times[1:],
        }
        for found, times in zip(bases, seconds, strict=True)
    ]


def memory(layers: int, clients: int, checkpointing: bool) -> dict[str, float]:
    """Peak bytes of a round of FAdamGC, less those before it, predicted and measured; its seconds."""
    torch.set_num_threads(1)
    size = base(512, layers)
    alg = load_algorithm("fadamgc")
    found = problem(size, RANK, clients, **SHAPE, checkpointing=checkpointing)
    info = round_info(alg, found, rounds=1, sampled=clients, tracked=None, local_steps=1)
    warm = problem(base(64, 1), RANK, 1, **SHAPE)
    warm.loss_and_gradient(warm.initial()[None], [0], 0, 0)
    setup = Setup(alg, found, info)
    federation = blank(setup)
    before = _peak()
    everybody = list(range(clients))
    seconds = _cpu(lambda: run_round(setup, federation, everybody, everybody, Plan()))
    rows = {name: 4 * found.dim * clients * count for name, count in row_vectors(alg).items()}
    tokens = clients * SHAPE["batch"] * SHAPE["length"]
    saved = size.saved(tokens, RANK, clients, bfloat16=False)
    return {
        "layers": layers,
        "stacked_clients": clients,
        "checkpointing": checkpointing,
        "rows": rows["step"],
        "activations": (size.inputs(tokens, bfloat16=False) + saved // layers if checkpointing else saved)
        + size.working(tokens, bfloat16=False),
        "measured": _peak() - before,
        "seconds": seconds,
    }


def message(size: int) -> dict[str, float]:
    """Bytes that each of two processes receives to sum vectors of `size` bytes, and the CPU seconds that this takes."""
    words = ["--standalone", "--nproc_per_node", "2", "-m", "benchmarks.scaling.validate_model", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def exchange(size: int) -> None:
    """In one of the two processes: the fastest of three sums of one part per process. Rank 0 prints the numbers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    executor = Collectives(torch.device("cpu"), timeout=600.0)
    part, like = torch.randn(size // 8, dtype=torch.float64), torch.zeros(size // 8, dtype=torch.float64)
    executor.sum_parts([part], executor.size, like)  # warm-up: connects the processes
    before = executor.bytes_received
    seconds = min(_cpu(lambda: executor.sum_parts([part], executor.size, like)) for _ in range(3))
    received = (executor.bytes_received - before) // 3
    if executor.rank == 0:
        print(json.dumps({"bytes": received, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def client_file(size: int) -> dict[str, float]:
    """Seconds to write a client's `size` bytes of vectors and to read them again."""
    with tempfile.TemporaryDirectory() as folder:
        store = ClientFiles(lambda count: {"y": torch.zeros(count, size // 4)}, Path(folder))
        rows = {"y": torch.randn(1, size // 4)}

        def once() -> None:
            store.put([0], rows)
            store.get([0])

        return {"bytes": size, "seconds": min(_cpu(once) for _ in range(3))}


def _fresh(*which: object) -> dict[str, float]:
    # glibc keeps freed blocks of up to 32 MB, which adds half as much again; these settings return them to the system.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling.validate_model", json.dumps(which)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _peak() -> int:
    """Peak resident bytes of this process so far, as Linux has it (getrusage's may be the parent's)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _cpu(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
