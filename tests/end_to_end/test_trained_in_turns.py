"""`lora.train: turns` (RoLoRA): B and the head in odd rounds, A in even rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import same_bits
from jobs import job

from fedllm import run_recipe
from fedllm.aggregation.product_gap import product_gap
from fedllm.common.errors import UserError
from fedllm.federation.local_training import train_part
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.models.lora import lora_products

TURNS = "lora.train=turns"
ALGORITHM = "algorithm={name: fedadamw, lr: 1.0e-2}"


def test_odd_rounds_train_b_and_the_head_and_even_rounds_a(tiny: Path) -> None:
    built = job(tiny, ALGORITHM, TURNS)
    state, space = start(built.setup), built.problem.space
    for part in ("B", "A", "B", "A"):
        before = space.views(state.x[None].clone())
        report = run_round(built.setup, state, [0, 1, 2], [0, 1, 2], Plan(products=built.products))
        after = space.views(state.x[None])
        moved = {name for name in space.names if not torch.equal(before[name], after[name])}
        assert moved == {name for name in space.names if (".lora_A." in name) == (part == "A")}
        assert report.drift["lora_gap"] == 0


def test_the_mean_of_the_products_is_the_product_of_the_means(tiny: Path) -> None:
    """In a round of A too, after B has moved: product_gap of the clients' real updates."""
    built = job(tiny, ALGORITHM, TURNS)
    state = start(built.setup)
    run_round(built.setup, state, [0, 1, 2], [0, 1, 2])
    for _ in range(2):
        setup = built.setup.at(state.round)
        assert setup.turn is not None
        seen = (setup.in_turn(setup.turn, state.x), state.in_turn(setup.turn))
        sums = [train_part(*seen, {client: 2}, {client}, 1, lambda _: None).reduction.sums["d"] for client in range(3)]
        updates = setup.turn.put(torch.zeros(3, built.problem.dim), torch.stack(sums).float())
        gap = product_gap(state.x, updates, torch.ones(3), lora_products(built.problem.space))
        assert gap is not None
        assert gap < 1e-12
        run_round(built.setup, state, [0, 1, 2], [0, 1, 2])


def test_about_half_the_values_are_sent(tiny: Path) -> None:
    both, turns = job(tiny, ALGORITHM), job(tiny, ALGORITHM, TURNS)
    states = [start(each.setup) for each in (both, turns)]
    up = [
        sum(run_round(each.setup, state, [0, 1], [0, 1]).bytes_up for _ in range(2))
        for each, state in zip((both, turns), states, strict=True)
    ]
    assert up[1] == up[0] / 2


@pytest.mark.slow
def test_a_run_that_was_interrupted_has_the_bits_of_one_that_was_not(tiny: Path, tmp_path: Path) -> None:
    overrides = [ALGORITHM, TURNS, "run.checkpoint_every=1", "federation.rounds=5"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "whole")
    for rounds in (3, 5):
        part = run_recipe(tiny / "recipe.yaml", [*overrides, f"federation.rounds={rounds}"], tmp_path / "part")
    assert same_bits(whole.folder, part.folder)
    assert [line["lora_gap"] for line in whole.metrics if "eval_loss" in line][-1] == 0
    assert whole.result["vectors_per_round"] == part.result["vectors_per_round"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.train=A"], "lora.train: found 'A', expected one of: AB, B, turns"),
        ([TURNS, "deployment.keep_local=head"], "lora.train: found turns with deployment.keep_local"),
    ],
)
def test_what_takes_no_turns_is_refused(tiny: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(tiny, *overrides)
