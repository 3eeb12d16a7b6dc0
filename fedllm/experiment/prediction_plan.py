"""Checks a prediction's files before the model is loaded. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.data.row_stream import TableOutline, outline
from fedllm.data.table_paths import require_new_table, require_table
from fedllm.experiment.sample_columns import text_columns
from fedllm.results.kept_rounds import require_rounds

PREDICTION, PROBABILITY = "prediction", "probability_"


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction whose files were checked. text: the columns of text. table: the input's rows and columns."""

    folder: Path
    file: Path
    out: Path
    text: tuple[str, ...]
    table: TableOutline
    probabilities: bool
    round: int | None


def plan_prediction(
    folder: str | Path,
    file: str | Path,
    out: str | Path,
    *,
    text: Sequence[str] | None = None,
    probabilities: bool = False,
    round: int | None = None,
) -> PredictionPlan:
    """The plan of `predict_file`, with its arguments. Reads the input once. Raises UserError for what is wrong."""
    folder, file, out = (Path(path).expanduser() for path in (folder, file, out))
    require_rounds(folder, round)
    require_table(file)
    require_new_table(out, file)
    columns = text_columns(load_recipe(folder / "recipe.yaml"), text)
    table = outline(file, columns)
    reserved = [name for name in table.names if name == PREDICTION or (probabilities and name.startswith(PROBABILITY))]
    if reserved:
        raise UserError(f"{file}: has a column '{reserved[0]}' already, which predict adds; rename it")
    return PredictionPlan(folder, file, out, columns, table, probabilities, round)
