"""What training changed: the scores before round 1 and of each value of a column."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import job

from fedllm import run_recipe
from fedllm.common.errors import UserError
from fedllm.experiment.evaluate_run import evaluate_run


@pytest.fixture(scope="module")
def marked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a validation file with the column `half`: rows of a, b, a, b, ..."""
    path = tmp_path_factory.mktemp("marked") / "validation.csv"
    head, *rows = (tiny / "validation.csv").read_text().splitlines()
    marks = [f"{row},{'ab'[number % 2]}" for number, row in enumerate(rows)]
    path.write_text("\n".join([f"{head},half", *marks]) + "\n")
    return [f"data.validation={path}", "federation.rounds=2", "run.trackers=[]"]


@pytest.mark.slow
def test_the_scores_at_the_start_and_of_each_value(tiny: Path, marked: list[str], tmp_path: Path) -> None:
    words = [*marked, "eval.start=true", "eval.by=half", "eval.every=2"]
    result = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").result
    plain = run_recipe(tiny / "recipe.yaml", marked, tmp_path / "plain").result
    assert result["final"] == plain["final"]
    assert not {"start", "by"} & plain.keys()
    values = result["by"]["values"]
    assert result["by"]["column"] == "half"
    assert {value: own["samples"] for value, own in values.items()} == {"a": 20, "b": 20}
    for when in ("start", "final"):
        halves = [values[value][when]["accuracy"] for value in "ab"]
        assert sum(halves) / 2 == pytest.approx(result[when]["accuracy"])
    before = run_recipe(
        tiny / "recipe.yaml",
        [*marked, "algorithm={name: fedavg, lr: 1.0e-12}", "federation.rounds=1"],
        tmp_path / "still",
    ).result
    assert result["start"]["eval_loss"] == pytest.approx(before["final"]["eval_loss"], rel=1e-5)
    assert result["start"]["eval_loss"] != pytest.approx(result["final"]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_the_scores_of_each_class(tiny: Path, marked: list[str], tmp_path: Path) -> None:
    """In result.json those of the final model, and the same from `fedllm evaluate`."""
    result = run_recipe(tiny / "recipe.yaml", [*marked, "eval.by_class=true"], tmp_path / "run").result
    found = result["by_class"]
    assert found["names"] == ["0", "1"]
    assert found["samples"] == [20, 20]
    assert sum(map(sum, found["confusion"])) == 40
    right = sum(found["confusion"][c][c] for c in range(2))
    assert right / 40 == pytest.approx(result["final"]["accuracy"])
    again = evaluate_run(tmp_path / "run")
    assert again.by_class is not None
    assert again.by_class["confusion"] == found["confusion"]
    assert again.by_class["macro_auroc"] == pytest.approx(found["macro_auroc"], abs=1e-6)
    table = again.class_table()
    assert table is not None
    assert table.row_count == 2
    assert again.to_json()["by_class"] == again.by_class


def test_a_regression_has_no_classes(tiny: Path, marked: list[str]) -> None:
    with pytest.raises(UserError, match=r"eval.by_class: found true, but .* has no classes: its task is a regression"):
        job(tiny, *marked, "eval.by_class=true", "data.regression=true")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "eval.by=sight",
            "eval.by: found 'sight' (did you mean 'site'?), expected a column of the validation split: site, half",
        ),
        ("eval.samples=3", "eval.samples: found 3, but only a language model answers prompts"),
    ],
)
def test_what_cannot_be_asked_of_an_evaluation(tiny: Path, marked: list[str], word: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        job(tiny, *marked, word)
    assert said in str(caught.value)
