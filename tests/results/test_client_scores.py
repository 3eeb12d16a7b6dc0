"""How scores are spread over clients."""

from __future__ import annotations

import pytest

from fedllm.results.client_scores import OfClient, Spread, spread, spread_of


def test_the_spread_of_a_score() -> None:
    values = [float(value) for value in range(1, 13)]
    found = spread_of("accuracy", values, [1] * 11 + [13])
    assert found["mean"] == 6.5
    assert found["weighted_mean"] == (66 + 12 * 13) / 24
    assert found["std"] == pytest.approx((143 / 12) ** 0.5), "of 1 to n: (n^2 - 1) / 12"
    assert (found["worst_tenth"], found["best_tenth"]) == (1.5, 11.5), "two of twelve clients"


def test_the_worst_losses_are_the_highest() -> None:
    found = spread_of("eval_loss", [0.1, 3.0, 0.5], [1, 1, 1])
    assert (found["worst_tenth"], found["best_tenth"]) == (3.0, 0.1)


def test_a_score_that_is_no_number_leaves_the_spread_open() -> None:
    assert set(spread_of("accuracy", [0.5, None], [1, 1]).values()) == {None}


def test_every_score_before_and_after_fine_tuning() -> None:
    def client(score: float, samples: int) -> OfClient:
        return OfClient(
            client=0, in_partition=0, name=None, trains=True, samples=samples,
            scores={"accuracy": score}, finetuned={"accuracy": 2 * score},
        )  # fmt: skip

    found = spread([client(0.2, 1), client(0.4, 3)])
    expected = Spread(mean=0.3, weighted_mean=0.35, std=0.1, worst_tenth=0.2, best_tenth=0.4)
    assert found["scores"]["accuracy"] == pytest.approx(expected)
    assert found["finetuned"]["accuracy"] == pytest.approx({name: 2 * value for name, value in expected.items()})
