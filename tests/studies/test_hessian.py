"""Exact Hessians, the measure of how block-diagonal they are, and the federated training they are taken in."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import write_rows
from torch import Tensor, nn

from fedllm import load_algorithm, simulate
from fedllm.blocks import partition
from fedllm.cli.commands import main
from fedllm.studies import hessian as study
from fedllm.studies.character_models import ALPHABET, WINDOW, CharacterProblem, encode
from fedllm.studies.hessian import Magnitude, block_of, checkpoints, hessian, magnitude, structure

TEXTS = [["the cat sat on the mat and the dog ran", "a big red tree"], ["blue! Is it? 42 very, very small"]]


def problem(kind: str) -> CharacterProblem:
    return CharacterProblem(kind, [encode(texts) for texts in TEXTS], seed=3)


def random_symmetric(n: int) -> Tensor:
    root = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return root + root.T


# Exactness


def test_of_a_quadratic_and_of_a_linear_loss() -> None:
    A, w = random_symmetric(20), torch.zeros(4, 5, dtype=torch.float64)
    torch.testing.assert_close(hessian(lambda w: 0.5 * w.flatten() @ A @ w.flatten(), w), A)
    assert not hessian(lambda w: w.sum(), w).any()


@pytest.mark.parametrize(
    ("kind", "role"),
    [("transformer", "query"), ("transformer", "embedding"), ("transformer", "MLP in"), ("mlp", "hidden")],
)
def test_against_finite_differences_of_the_gradient(kind: str, role: str) -> None:
    p = problem(kind)
    windows, name = p.probe(2), p.model.weights[role]
    parameters = {key: value[0] for key, value in p.space.views(p.initial()[None]).items()}

    def gradient(w: Tensor) -> Tensor:
        w = w.clone().requires_grad_()
        return torch.autograd.grad(p.loss({**parameters, name: w}, windows), w)[0].flatten()

    w = parameters[name]
    H = hessian(lambda w: p.loss({**parameters, name: w}, windows), w)
    for column in (0, 37, w.numel() - 1):
        step = torch.zeros(w.numel(), dtype=w.dtype)
        step[column] = 1e-4
        difference = (gradient(w + step.view_as(w)) - gradient(w - step.view_as(w))) / 2e-4
        torch.testing.assert_close(H[:, column], difference, rtol=1e-5, atol=1e-9)


# The measure


def test_blocks_of_ones_by_hand() -> None:
    owner = torch.tensor([0, 0, 1, 1, 1, 2])
    H = (owner[:, None] == owner).double()
    found = structure(H, owner)
    # 14 entries of which 6 are on the diagonal; two coordinates meet in a random block with 2 + 6 of 30 chances
    assert (found.inside, found.random) == pytest.approx((1.0, (6 + 8 * 8 / 30) / 14))
    assert found.ratio == pytest.approx(1 / found.random)


def test_random_is_the_mean_over_all_partitions_of_these_sizes() -> None:
    H, owner = random_symmetric(6), torch.tensor([0, 0, 1, 1, 1, 2])
    shares = [structure(H, owner[list(order)]).inside for order in itertools.permutations(range(6))]
    assert structure(H, owner).random == pytest.approx(sum(shares) / len(shares), rel=1e-12)


def test_independent_neurons_are_block_diagonal_by_row_and_not_by_column() -> None:
    x, w = torch.randn(14, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).split((10, 4))
    H = hessian(lambda w: (x @ w.T).tanh().sum(), w)
    rows = block_of(partition(nn.Linear(3, 4, bias=False)), "weight")
    assert not H[rows[:, None] != rows].any()
    assert structure(H, rows).inside == pytest.approx(1)
    assert structure(H, torch.arange(12) % 3).ratio < 1


def test_a_hessian_of_zeros_has_no_structure() -> None:
    with pytest.raises(ValueError, match="zero everywhere"):
        structure(torch.zeros(2, 2), torch.tensor([0, 1]))


def test_magnitude_by_hand() -> None:
    """The eigenvalues of [[1, 2], [2, -2]] are -3 and 2."""
    found = magnitude(torch.tensor([[1.0, 2.0], [2.0, -2.0]]))
    assert found == Magnitude(pytest.approx(7 / 4), 2.0, pytest.approx(13**0.5), pytest.approx(3.0))


def test_magnitude_of_a_scaled_loss_is_scaled() -> None:
    H = random_symmetric(9)
    once, thrice = magnitude(H), magnitude(-3 * H)
    for name in ("mean_entry", "largest_entry", "frobenius", "eigenvalue"):
        assert getattr(thrice, name) == pytest.approx(3 * getattr(once, name))


# The models and their training


def test_blocks_of_the_small_transformer_are_those_of_the_rules() -> None:
    p = problem("transformer")
    roles = {tile.name: tile.role for tile in p.blocks.tiles}
    weights = p.model.weights
    assert [roles[weights[w]] for w in ("query", "key", "value", "projection", "embedding")] == [
        "query", "key", "value", "attention output", "embedding",
    ]  # fmt: skip
    head, column = torch.arange(16) // 4, torch.arange(32)
    for role, expected in {
        "query": head[:, None].expand(16, 16),
        "value": torch.arange(16)[:, None].expand(16, 16),
        "MLP in": column.expand(16, 32),  # GPT-2 stores it [in, out]
        "output": torch.arange(len(ALPHABET))[:, None].expand(-1, 16),
    }.items():
        owner = block_of(p.blocks, weights[role])
        assert torch.equal(owner - owner.min(), expected.flatten()), role


@pytest.mark.slow
def test_smaller_initial_weights_widen_the_gap_between_query_and_value() -> None:
    """The factor between value and query depends on the initial scale (docs/explanation/hessian.md)."""
    p = problem("transformer")
    windows = p.probe(2)
    start = {name: x[0] for name, x in p.space.views(p.initial()[None]).items()}

    def gap(scale: float) -> float:
        weights = {name: scale * x if x.ndim == 2 else x for name, x in start.items()}
        sizes = []
        for name in (p.model.weights["value"], p.model.weights["query"]):
            H = hessian(lambda w, name=name: p.loss({**weights, name: w}, windows), weights[name])
            sizes.append(magnitude(H).mean_entry)
        return sizes[0] / sizes[1]

    assert gap(1) > 5
    assert gap(0.2) > 20 * gap(1)


def test_encode_and_windows() -> None:
    assert encode(["A-b", "c3"]).tolist() == [0, 1, 0, 2, 0, 3]
    windows = problem("mlp").probe(3)
    assert windows.shape == (6, WINDOW + 1)
    assert torch.equal(windows, problem("mlp").probe(3))


@pytest.mark.parametrize("kind", ["transformer", "mlp"])
def test_it_is_federated_training(kind: str) -> None:
    p = problem(kind)
    alg = load_algorithm("fedadamw", lr=1e-2)
    result = simulate(alg, p, rounds=4, local_steps=4)
    assert result.server["vbar"].shape == (p.blocks.num_blocks,)
    assert result.loss[-1] < result.loss[0] - 0.1
    alone = simulate(alg, p, rounds=4, local_steps=4, cohort=1)
    torch.testing.assert_close(alone.x, result.x, rtol=0, atol=1e-12)


def test_checkpoints() -> None:
    assert [checkpoints(rounds) for rounds in (1, 2, 50)] == [(0, 1), (0, 1, 2), (0, 5, 25, 50)]


# The command


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "PROBE", 1)
    data, out = write_rows(tmp_path / "rows.csv", 300, seed=0), tmp_path / "out"
    assert main(["hessian", "--model", "mlp", "--rounds", "2", "--data", str(data), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("embedding", "hidden", "output", "round 2", "27 in 216", "16 in 1,024"))
    assert {path.name for path in out.iterdir()} == {"hessian.json", "hessian_mlp.png", "hessian_mlp.svg"}
    record = json.loads((out / "hessian.json").read_text())
    maps = record["models"]["mlp"]["maps"]
    assert [(m["round"], m["role"]) for m in maps] == [
        (t, role) for t in (0, 1, 2) for role in ("embedding", "hidden", "output")
    ]
    assert all(0 < m["inside"] <= 1 and m["ratio"] == m["inside"] / m["random"] for m in maps)
    assert all(0 < m["mean_entry"] <= m["largest_entry"] <= m["eigenvalue"] <= m["frobenius"] for m in maps)
    assert f"{maps[0]['mean_entry']:.1e}" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "--rounds: found 0"),
        (["--out", __file__], "is a file"),
        (["--algorithm", "fedadamx"], "fedadamw"),
        (["--data", "no/such"], "no/such"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["hessian", "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
