"""Early stopping and the best round: when a run ends, which checkpoint it keeps, and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import same_bits

from fedllm import load_recipe, run_recipe
from fedllm.common.errors import UserError
from fedllm.experiment.export import export_adapter
from fedllm.experiment.run import dry_run
from fedllm.experiment.session import ended_by
from fedllm.results.format import best_line, out_of_patience

STILL = ["algorithm.lr=1.0e-30", "federation.rounds=6"]  # a model that never changes


def lines(scores: list[float | None], name: str = "accuracy") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, one evaluation every second round."""
    return [
        line
        for number, score in enumerate(scores, 1)
        for line in ({"round": 2 * number - 1}, {"round": 2 * number, "eval_loss": 1.0, name: score})
    ]


@pytest.mark.parametrize(
    ("scores", "patience", "over"),
    [
        ([0.5, 0.6, 0.7], 1, False),
        ([0.5, 0.7, 0.7], 1, True),  # as good is not better
        ([0.5, 0.7, 0.6], 2, False),
        ([0.7, 0.6, 0.65], 2, True),
        ([0.7, 0.6, 0.71], 2, False),
        ([0.7, None, None], 2, True),  # it diverged
        ([None, None], 1, True),
        ([0.7], 1, False),
        ([0.7, 0.6, 0.5], None, False),
        ([], 1, False),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    scores: list[float | None], patience: int | None, over: bool
) -> None:
    assert out_of_patience("accuracy", patience, lines(scores)) is over
    falling = [None if score is None else 1 - score for score in scores]
    assert out_of_patience("perplexity", patience, lines(falling, "perplexity")) is over


def test_the_best_line_is_the_first_of_equals() -> None:
    found = best_line("accuracy", lines([0.5, 0.7, 0.7]))
    assert found is not None
    assert found["round"] == 4
    assert best_line("accuracy", lines([None])) is None


def test_what_ended_a_run(tiny: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml", ["eval={patience: 1, target: {accuracy: 0.9}, stop_at_target: true}"])
    found = [ended_by(recipe, "accuracy", lines(scores)) for scores in ([0.5], [0.9], [0.5, 0.5], [0.5, 0.6])]
    assert found == [None, "target", "rounds", "rounds"]  # it has 4 rounds
    longer = load_recipe(tiny / "recipe.yaml", ["eval.patience=1", "federation.rounds=9"])
    assert ended_by(longer, "accuracy", lines([0.5, 0.5])) == "patience"


@pytest.mark.slow
def test_a_run_without_a_better_score_ends(tiny: Path, tmp_path: Path) -> None:
    run = run_recipe(tiny / "recipe.yaml", [*STILL, "eval.patience=2", "eval.metric=eval_loss"], tmp_path / "run")
    assert (run.result["rounds"], run.result["ended_by"], run.result["best_by"]) == (3, "patience", "eval_loss")
    before = (run.folder / "result.json").read_bytes()
    again = run_recipe(tiny / "recipe.yaml", [*STILL, "eval.patience=2", "eval.metric=eval_loss"], run.folder)
    assert again.result == run.result
    assert (run.folder / "result.json").read_bytes() == before
    longer = run_recipe(tiny / "recipe.yaml", [*STILL, "eval.patience=4", "eval.metric=eval_loss"], run.folder)
    assert (longer.result["rounds"], longer.result["ended_by"]) == (5, "patience")


@pytest.mark.slow
def test_the_best_round_is_kept_and_exported(tiny: Path, tmp_path: Path) -> None:
    kept = ["eval.keep_best=true", "eval.metric=eval_loss", "run.checkpoint_every=100"]
    run = run_recipe(tiny / "recipe.yaml", [*kept, "federation.rounds=8", "algorithm.lr=0.3"], tmp_path / "run")
    best = run.result["best"]["eval_loss"]["round"]
    assert best < 7, "the run is too good to show that an early round is kept"
    assert (run.folder / "checkpoints" / f"{best:06d}").is_dir()
    export_adapter(run.folder, tmp_path / "best" / "adapter", best=True)
    short = run_recipe(tiny / "recipe.yaml", [f"federation.rounds={best}", "algorithm.lr=0.3"], tmp_path / "short")
    assert same_bits(tmp_path / "best", short.folder)


def test_a_metric_of_another_task_is_an_error(tiny: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.metric: found metric 'pearson', expected one of accuracy, "):
        dry_run(load_recipe(tiny / "recipe.yaml", ["eval.metric=pearson"]))
    with pytest.raises(UserError, match=r"eval\.patience: found 0"):
        load_recipe(tiny / "recipe.yaml", ["eval.patience=0"])
