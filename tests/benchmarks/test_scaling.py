"""The model of docs/explanation/scaling.md counts what the library does, and the page has the tables of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scaling.model import Base, Work
from benchmarks.scaling.page import PAGE, filled
from benchmarks.scaling.validate_model import problem
from fedllm.algorithms import load_algorithm
from fedllm.common.tensors import State
from fedllm.federation.costs import row_vectors
from fedllm.federation.info import round_info
from fedllm.federation.local_training import train_part
from fedllm.federation.rounds import run_round
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState, blank
from fedllm.problems.lora.problem import LoraProblem

BASE = Base("small", hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, vocabulary=50)
RANK, CLIENTS, BATCH, LENGTH = 4, 3, 2, 10
TOKENS = CLIENTS * BATCH * LENGTH


def build(layers: int, bfloat16: bool = False) -> tuple[Base, LoraProblem]:
    base = replace(BASE, layers=layers)
    return base, problem(base, RANK, CLIENTS, BATCH, LENGTH, bfloat16=bfloat16)


def saved_bytes(found: LoraProblem, bfloat16: bool) -> int:
    """Bytes of all that a forward keeps, but for the model's own weights and, in float32, the rows X."""
    weights = {value.untyped_storage().data_ptr() for value in found.model.model.parameters()}
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
def test_a_layers_activations(bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer more, since the first and the head keep a little less and more."""
    monkeypatch.setattr("fedllm.problems.lora.attention._LOW", ())  # as on a GPU
    (_, two), (_, three) = (build(layers, bfloat16) for layers in (2, 3))
    measured = saved_bytes(three, bfloat16) - saved_bytes(two, bfloat16)
    assert measured == replace(BASE, layers=1).saved(TOKENS, RANK, CLIENTS, bfloat16)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_checkpointed_layer_keeps_its_input(bfloat16: bool) -> None:
    (_, two), (_, three) = (build(layers, bfloat16) for layers in (2, 3))
    for found in (two, three):
        found.model.checkpoint_blocks()
    measured = saved_bytes(three, bfloat16) - saved_bytes(two, bfloat16)
    assert measured == replace(BASE, layers=1).inputs(TOKENS, bfloat16)


def test_weights_and_trainable_values() -> None:
    base, found = build(2)
    assert found.dim == base.trainable(RANK)
    trained_twice = 2 * base.hidden  # PEFT keeps the head that it replaces
    assert sum(value.numel() for value in found.model.model.parameters()) == base.frozen + found.dim + trained_twice


def test_a_layers_operations() -> None:
    def counted(layers: int) -> tuple[int, float]:
        base, found = build(layers)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            found.loss_and_gradient(found.initial().expand(CLIENTS, -1).clone(), range(CLIENTS), 0, 0)
        return counter.get_total_flops(), TOKENS * base.operations(LENGTH, RANK)

    (two, predicted_two), (three, predicted_three) = counted(2), counted(3)
    assert three - two == predicted_three - predicted_two


def trained(algorithm: str) -> tuple[LoraProblem, FederationState, float, int, State]:
    """A round: its problem and federation, the bytes that each of two processes receives for the sums of one part each
    (see collective_checks.py), those of the clients' files, and the rows held."""
    _, found = build(1)
    alg = load_algorithm(algorithm)
    info = round_info(alg, found, rounds=1, sampled=CLIENTS, tracked=None, local_steps=1)
    federation = blank(Setup(alg, found, info))
    clients = list(range(CLIENTS))
    setup = Setup(alg, found, info)
    part = train_part(setup, federation, dict.fromkeys(clients, 1), set(clients), None, lambda done: None)
    sums = sum(value.nbytes for value in part.reduction.sums.values() if value.numel() == found.dim)
    received = sums + (0 if part.drift.moments is None else part.drift.moments.nbytes / 2)
    federation.clients.commit(part.staged)
    kept = federation.clients.nbytes()
    federation = blank(setup)
    run_round(setup, federation, clients, clients)
    kept_in_begin = federation.clients.get(clients)
    local = alg.begin(federation.x.expand(CLIENTS, -1), federation.server, kept_in_begin, info)
    return found, federation, received, kept, {**local, **{f"kept {name}": v for name, v in kept_in_begin.items()}}


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fadamgc"])
def test_state_rows_and_messages(algorithm: str) -> None:
    found, federation, received, kept, held = trained(algorithm)
    work = Work(replace(BASE, layers=1), algorithm, clients=CLIENTS, sampled=CLIENTS, rank=RANK, gpus=2)
    assert work.dim == found.dim
    assert federation.clients.nbytes() == kept == CLIENTS * work.state
    step = row_vectors(work.rule)["step"]
    gradient_and_temporaries = 3
    assert sum(value.nbytes for value in held.values()) == 4 * CLIENTS * found.dim * (step - gradient_and_temporaries)
    assert work.messages() == received
    assert work.disk == kept


def test_the_page_is_what_the_model_gives() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- end -->") == 5
    assert filled(text) == text
