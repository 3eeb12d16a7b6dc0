"""The model of docs/scaling.md counts the library's own tensors and operations, and the page is what it gives."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedllm.algorithms import load_algorithm
from fedllm.algorithms.base import State
from fedllm.lora_problem import LoraProblem
from fedllm.rounds import Federation, blank, round_info, run_round
from fedllm.training import train_share

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from scaling_model import Base, Work, row_vectors
from scaling_page import PAGE, filled
from scaling_sweep import problem

BASE = Base("small", hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=50)
RANK, CLIENTS, BATCH, LENGTH = 4, 3, 2, 10
TOKENS = CLIENTS * BATCH * LENGTH


def build(layers: int, bfloat16: bool = False) -> tuple[Base, LoraProblem]:
    base = replace(BASE, layers=layers)
    return base, problem(base, RANK, CLIENTS, BATCH, LENGTH, bfloat16=bfloat16)


def saved_bytes(found: LoraProblem, bfloat16: bool) -> int:
    """Bytes of all that a forward keeps, but for the model's own weights and, in float32, the rows X."""
    weights = {value.untyped_storage().data_ptr() for value in found._model.model.parameters()}
    X = found.initial().expand(CLIENTS, -1).clone()
    seen: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        seen[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        found.loss_and_gradient(X, range(CLIENTS), 0, 0)
    theirs = weights | {X.untyped_storage().data_ptr()}
    return sum(value.untyped_storage().nbytes() for place, value in seen.items() if place not in theirs)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_layers_activations(bfloat16: bool) -> None:
    """Of one layer more, since the first and the head keep a little less and more."""
    (_, two), (_, three) = (build(layers, bfloat16) for layers in (2, 3))
    measured = saved_bytes(three, bfloat16) - saved_bytes(two, bfloat16)
    assert measured == replace(BASE, layers=1).saved(TOKENS, RANK, CLIENTS, bfloat16)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_checkpointed_layer_keeps_its_input(bfloat16: bool) -> None:
    (_, two), (_, three) = (build(layers, bfloat16) for layers in (2, 3))
    for found in (two, three):
        found._model.checkpointing = True
    measured = saved_bytes(three, bfloat16) - saved_bytes(two, bfloat16)
    assert measured == replace(BASE, layers=1).inputs(TOKENS, bfloat16)


def test_weights_and_trainable_values() -> None:
    base, found = build(2)
    assert found.dim == base.trainable(RANK)
    trained_twice = 2 * base.hidden  # PEFT keeps the head that it replaces
    assert sum(value.numel() for value in found._model.model.parameters()) == base.frozen + found.dim + trained_twice


def test_a_layers_operations() -> None:
    def counted(layers: int) -> tuple[int, float]:
        base, found = build(layers)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            found.loss_and_gradient(found.initial().expand(CLIENTS, -1).clone(), range(CLIENTS), 0, 0)
        return counter.get_total_flops(), TOKENS * base.operations(LENGTH, RANK)

    (two, predicted_two), (three, predicted_three) = counted(2), counted(3)
    assert three - two == predicted_three - predicted_two


def trained(algorithm: str) -> tuple[LoraProblem, Federation, int, int, State]:
    """A round: its problem and federation, and of the share that a worker would send back the bytes of the sums and
    of the clients' rows."""
    _, found = build(1)
    alg = load_algorithm(algorithm)
    info = round_info(alg, found, rounds=1, sampled=CLIENTS, tracked=None, local_steps=1)
    federation = blank(alg, found, info)
    clients = list(range(CLIENTS))
    share = train_share(alg, found, federation, info, dict.fromkeys(clients, 1), set(clients), None, lambda done: None)
    _, tensors = share.pack()
    sums = sum(v.nbytes for n, v in tensors.items() if not n.startswith("client/") and v.numel() == found.dim)
    kept = sum(v.nbytes for n, v in tensors.items() if n.startswith("client/"))
    run_round(alg, found, federation, info, clients, clients)
    kept_in_begin = federation.clients.get(clients)
    local = alg.begin(federation.x.expand(CLIENTS, -1), federation.server, kept_in_begin, info)
    return found, federation, sums, kept, {**local, **{f"kept {name}": v for name, v in kept_in_begin.items()}}


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fadamgc"])
def test_state_rows_and_messages(algorithm: str) -> None:
    found, federation, sums, kept, held = trained(algorithm)
    work = Work(replace(BASE, layers=1), algorithm, clients=CLIENTS, sampled=CLIENTS, rank=RANK, gpus=2)
    assert work.dim == found.dim
    assert federation.clients.nbytes() == kept == CLIENTS * work.state
    step = row_vectors(work.rule)["step"]
    gradient_and_temporaries = 3
    assert sum(value.nbytes for value in held.values()) == 4 * CLIENTS * found.dim * (step - gradient_and_temporaries)
    down = federation.x.nbytes + sum(value.nbytes for value in federation.server.values())
    assert work.messages() == down + sums
    assert work.disk == kept


def test_the_page_is_what_the_model_gives() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- end -->") == 5
    assert filled(text) == text
