"""Predicts what the samples of a file are, chunk by chunk, so that a file may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedllm.common.console import LongLoop
from fedllm.common.errors import RunError, UserError
from fedllm.data.row_stream import Chunk
from fedllm.data.row_writer import writing
from fedllm.experiment.answerer import Answerer
from fedllm.experiment.inference import Inference, Predictions
from fedllm.experiment.prediction_plan import PREDICTION, PROBABILITY, PredictionPlan, plan_prediction
from fedllm.experiment.trained import load_trained


@dataclass(frozen=True)
class PredictedFile:
    """A file of predictions. rows: how many. round: the round after which the model was taken."""

    path: Path
    rows: int
    round: int


def load_predictor(folder: str | Path, round: int | None = None) -> Inference:
    """The model of a run's newest checkpoint, or of `round`, for predictions in memory.

        model = load_predictor("runs/mine-s0")
        model.predict(["the patient is well", "a second text"]).values

    Raises UserError if `folder` is not a run with such a checkpoint.
    """
    return Inference(load_trained(folder, round))


def predict_file(
    folder: str | Path,
    file: str | Path,
    out: str | Path,
    *,
    text: Sequence[str] | None = None,
    probabilities: bool = False,
    round: int | None = None,
    new_tokens: int | None = None,
    image: str | None = None,
) -> PredictedFile:
    """Writes the rows of `file` to `out`, with a column `prediction`; the same as `fedllm predict`.

    The kinds of both files follow from their suffixes: .csv, .tsv, .jsonl, .parquet, and .json to read. `prediction` is
    the name of a class, or a number; with `probabilities` there is a column probability_<class> for each class. Of a
    language model it is the greedy answer to the row's prompt, of at most `new_tokens` tokens (eval.new_tokens by
    default). Rows keep their order. `out` is replaced when all is written. text, image: the columns of text or of
    images, by default those of the run's own data. A run on images takes a folder of images too, whose rows have the
    one column `file`. round: see load_trained.
    Raises UserError for what is wrong with these, before the model is loaded.
    """
    options = {"text": text, "probabilities": probabilities, "round": round, "new_tokens": new_tokens}
    options["image"] = image
    return predict_planned(plan_prediction(folder, file, out, **options))  # type: ignore[arg-type]


def predict_planned(plan: PredictionPlan) -> PredictedFile:
    """See predict_file."""
    model = load_predictor(plan.folder, plan.round)
    classes = model.run.task.classes
    if plan.probabilities and not classes:
        raise UserError(f"--probabilities: {plan.folder} predicts numbers, which have none; leave it out")
    added = {PREDICTION: str} if plan.questions else _added(classes, plan.probabilities)
    predict = _predictor(model, plan)
    done = 0
    try:
        with (
            writing(plan.out, plan.table.names, added) as write,
            LongLoop("predicting rows", plan.table.rows) as progress,
        ):
            for chunk in plan.chunks():
                write(plan.written(chunk), predict(chunk))
                done += len(chunk.records)
                progress.update(done)
    except OSError as error:
        raise RunError(f"{plan.out} could not be written: {error}; make room") from error
    return PredictedFile(plan.out, done, model.run.round)


def _predictor(model: Inference, plan: PredictionPlan) -> Callable[[Chunk], dict[str, list[Any]]]:
    """A function that gives the added columns of a chunk."""
    if (questions := plan.questions) is not None:
        answerer = Answerer(model)
        return lambda chunk: {PREDICTION: answerer.answers(questions.of(chunk), plan.new_tokens)}
    if (images := plan.images) is not None:
        return lambda chunk: _columns(model.predict_images(images.decode(chunk)), plan.probabilities)
    return lambda chunk: _columns(model.predict(*(chunk.texts(column) for column in plan.text)), plan.probabilities)


def _added(classes: Sequence[str], probabilities: bool) -> dict[str, type]:
    kinds: dict[str, type] = {PREDICTION: str if classes else float}
    return kinds | ({f"{PROBABILITY}{name}": float for name in classes} if probabilities else {})


def _columns(found: Predictions, probabilities: bool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {PREDICTION: found.values}
    for index, name in enumerate(found.classes if probabilities else ()):
        columns[f"{PROBABILITY}{name}"] = found.probability(index)
    return columns
