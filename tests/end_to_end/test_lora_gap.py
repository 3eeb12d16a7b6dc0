"""`lora_gap` in the rounds of a tiny run: numpy's from the same uploads, 0 where A is not trained, and no other bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import job

from fedllm.federation.local_training import train_part
from fedllm.federation.rounds import Plan, run_round, start

ALGORITHM = "algorithm={name: fedadamw, lr: 1.0e-2}"


def test_it_is_numpys_of_the_uploads_and_changes_nothing_else(tiny: Path) -> None:
    built = job(tiny, ALGORITHM)
    clients, space = [0, 1, 2, 5], built.problem.space
    state, other = start(built.setup), start(built.setup)
    steps = {client: built.problem.batches.steps(client) for client in clients}
    uploads = [
        train_part(built.setup, state, {client: count}, set(), 1, lambda _: None, keep=True).updates[0][1]
        for client, count in steps.items()
    ]
    models = [{name: value[0].double().numpy() for name, value in space.views(state.x + d).items()} for d in uploads]
    before = {name: value[0].double().numpy() for name, value in space.views(state.x[None]).items()}
    gap = move = 0.0
    for b in (name for name in space.names if ".lora_B." in name):
        a = b.replace("lora_B", "lora_A")
        mean = np.mean([model[b] @ model[a] for model in models], axis=0)
        gap += np.square(mean - np.mean([m[b] for m in models], axis=0) @ np.mean([m[a] for m in models], axis=0)).sum()
        move += np.square(mean - before[b] @ before[a]).sum()
    report = run_round(built.setup, state, clients, clients, Plan(products=built.products, stacked_clients=1))
    assert report.drift["lora_gap"] == pytest.approx(float(np.sqrt(gap / move)), rel=1e-5)
    assert report.drift["lora_gap"] > 0.01
    plain = run_round(built.setup, other, clients, clients, Plan(stacked_clients=1))
    assert torch.equal(state.x, other.x)
    assert {name: value for name, value in report.drift.items() if name != "lora_gap"} == plain.drift
    assert replace(report, drift={}, compute_seconds=0) == replace(plain, drift={}, compute_seconds=0)


def test_b_alone_has_none(tiny: Path) -> None:
    built = job(tiny, ALGORITHM, "lora.train=B")
    report = run_round(built.setup, start(built.setup), [0, 1, 2], [0, 1, 2], Plan(products=built.products))
    assert report.drift["lora_gap"] == 0
