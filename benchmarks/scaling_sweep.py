"""Measures here what benchmarks/scaling_model.py predicts: seconds from operations, memory of a step, messages, files.

python benchmarks/scaling_sweep.py            # into scale/sweep.json; about two CPU minutes, one thread

Random Llama models, since only sizes matter. Seconds are CPU seconds of the process, the fastest of the repeats; the
sizes take turns. Memory is the peak resident size of a process of its own, less what it had before the round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scaling_model import Base, row_vectors
from scaling_page import SWEEP
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from fedllm.algorithms import load_algorithm
from fedllm.batches import ClientBatches
from fedllm.clients import ClientFiles
from fedllm.lora import attach_lora
from fedllm.lora_problem import LoraProblem
from fedllm.models import Backbone
from fedllm.processes import Links
from fedllm.recipe import Lora
from fedllm.records import versions
from fedllm.rounds import Plan, blank, round_info, run_round
from fedllm.tokens import Tokens

SIZES = ((128, 4), (256, 4), (512, 4), (768, 6), (1024, 8))
ROUNDS = ((4, 1, False), (4, 4, False), (4, 16, False), (12, 4, False), (12, 4, True))  # layers, cohort, checkpointing
SHAPE = {"batch": 4, "length": 64}
RANK, REPEATS = 16, 3


def base(hidden: int, layers: int) -> Base:
    """A small decoder with the proportions of the 7B one."""
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
    """Clients with one batch each of random tokens, all of one length, over a random model."""
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
    model = LlamaForSequenceClassification(config).requires_grad_(False)
    if bfloat16:
        model = model.to(torch.bfloat16)
    no_tokenizer = cast(PreTrainedTokenizerBase, None)
    adapted = attach_lora(Backbone(model, no_tokenizer, base.name, "hub", ("score",), None), Lora(rank=rank))
    rows = clients * batch
    ids = torch.arange(rows * length, dtype=torch.int32) % (base.vocabulary - 1) + 1
    tokens = Tokens(ids, None, torch.arange(0, rows * length + 1, length), torch.arange(rows) % 2)
    parts = np.split(np.arange(rows), clients)
    batches = ClientBatches(parts, batch_size=batch, epochs=1, steps=None, seed=0)
    low = torch.bfloat16 if bfloat16 else None
    return LoraProblem(adapted, tokens, batches, slices=1, autocast=low, checkpointing=checkpointing)


def main() -> None:
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
    SWEEP.write_text(json.dumps(found, indent=1) + "\n")


def product_rate() -> float:
    """Operations a second of a plain float32 product [1024, 2048] x [2048, 2048], the best of ten."""
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    return 2 * 1024 * 2048 * 2048 / min(_cpu(lambda: a @ b) for _ in range(10))


def speed() -> list[dict[str, Any]]:
    """Seconds of one local step of two clients, by size of the base."""
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


def memory(layers: int, cohort: int, checkpointing: bool) -> dict[str, float]:
    """Bytes that a round of FAdamGC needs beyond what was there before it, predicted and measured; its seconds."""
    torch.set_num_threads(1)
    size = base(512, layers)
    alg = load_algorithm("fadamgc")
    found = problem(size, RANK, cohort, **SHAPE, checkpointing=checkpointing)
    info = round_info(alg, found, rounds=1, sampled=cohort, tracked=None, local_steps=1)
    warm = problem(base(64, 1), RANK, 1, **SHAPE)
    warm.loss_and_gradient(warm.initial()[None], [0], 0, 0)
    federation = blank(alg, found, info)
    before = _peak()
    clients = list(range(cohort))
    seconds = _cpu(lambda: run_round(alg, found, federation, info, clients, clients, Plan()))
    rows = {name: 4 * found.dim * cohort * count for name, count in row_vectors(alg).items()}
    tokens = cohort * SHAPE["batch"] * SHAPE["length"]
    kept = size.saved(tokens, RANK, cohort, bfloat16=False)
    return {
        "layers": layers,
        "cohort": cohort,
        "checkpointing": checkpointing,
        "rows": rows["step"],
        "activations": (size.inputs(tokens, bfloat16=False) + kept // layers if checkpointing else kept)
        + size.working(tokens, bfloat16=False),
        "measured": _peak() - before,
        "seconds": seconds,
    }


def message(size: int) -> dict[str, float]:
    """Seconds to send and receive a message of `size` bytes between two threads of one core."""
    here, there = Pipe()
    sender, receiver = Links({1: here}, 2), Links({0: there}, 2)
    tensors = {"x": torch.randn(size // 4)}

    def receive() -> None:
        receiver.ready([0], 60.0)
        receiver.receive(0)

    def once() -> None:
        thread = threading.Thread(target=receive)
        thread.start()
        sender.send(1, {}, tensors)
        thread.join()

    return {"bytes": size, "seconds": min(_cpu(once) for _ in range(3))}


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
    # glibc's allocator keeps freed blocks of up to 32 MB, half as much again here: what is freed shall be given back.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(which)], env=environment, stdout=subprocess.PIPE, check=True
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
