"""Checks a prediction's files before the model is loaded. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.data.conversations.questions import Questions, find_questions
from fedllm.data.row_stream import TableOutline, outline, read_chunks
from fedllm.data.settings import CAUSAL_LM
from fedllm.data.table_paths import require_new_table, require_table
from fedllm.experiment.sample_columns import text_columns
from fedllm.results.kept_rounds import require_rounds

PREDICTION, PROBABILITY = "prediction", "probability_"


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction whose files were checked. text: the columns of text. table: the input's rows and columns.

    questions: where the prompts of a language model are, None for other runs. new_tokens: the most of an answer.
    """

    folder: Path
    file: Path
    out: Path
    text: tuple[str, ...]
    table: TableOutline
    probabilities: bool
    round: int | None
    questions: Questions | None = None
    new_tokens: int = 0


def plan_prediction(
    folder: str | Path,
    file: str | Path,
    out: str | Path,
    *,
    text: Sequence[str] | None = None,
    probabilities: bool = False,
    round: int | None = None,
    new_tokens: int | None = None,
) -> PredictionPlan:
    """The plan of `predict_file`, with its arguments. Reads the input once. Raises UserError for what is wrong."""
    folder, file, out = (Path(path).expanduser() for path in (folder, file, out))
    require_rounds(folder, round)
    require_table(file)
    require_new_table(out, file)
    recipe = load_recipe(folder / "recipe.yaml")
    asks = recipe.data.task == CAUSAL_LM
    _check_options(asks, probabilities, new_tokens)
    columns = () if asks else text_columns(recipe, text)
    table = outline(file, columns)
    questions = find_questions(recipe.data, file, table.names, text) if asks else None
    if questions is not None:
        for chunk in read_chunks(file):
            questions.of(chunk)
    reserved = [name for name in table.names if name == PREDICTION or (probabilities and name.startswith(PROBABILITY))]
    if reserved:
        raise UserError(f"{file}: has a column '{reserved[0]}' already, which predict adds; rename it")
    most = new_tokens or recipe.eval.new_tokens
    return PredictionPlan(folder, file, out, columns, table, probabilities, round, questions, most)


def _check_options(asks: bool, probabilities: bool, new_tokens: int | None) -> None:
    if asks and probabilities:
        raise UserError("--probabilities: the run trained a language model, which has no classes; leave it out")
    if new_tokens is not None and not asks:
        raise UserError("--new-tokens: the run trained no language model, whose answers have tokens; leave it out")
    if new_tokens is not None and new_tokens < 1:
        raise UserError(f"--new-tokens={new_tokens}: expected at least 1")
