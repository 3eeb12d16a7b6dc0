"""Checks a prediction's files before the model is loaded. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.data.arrow_files import PLAIN_CSV, CsvForm
from fedllm.data.conversations.questions import Questions, find_questions
from fedllm.data.image_decoding import require_pillow
from fedllm.data.image_stream import ImageColumn
from fedllm.data.known_images import reads_images
from fedllm.data.row_choice import csv_form
from fedllm.data.row_stream import Chunk, TableOutline, outline, outline_of, read_chunks
from fedllm.data.settings import CAUSAL_LM
from fedllm.data.table_paths import require_new_table, require_table
from fedllm.experiment.sample_columns import image_column, text_columns
from fedllm.results.kept_rounds import require_rounds

PREDICTION, PROBABILITY = "prediction", "probability_"


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction whose files were checked. text: the columns of text. table: the input's rows and columns.

    questions: where the prompts of a language model are, None for other runs. new_tokens: the most of an answer.
    images: where the images are, None for other runs. form: how a CSV file is written: as the run's own.
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
    images: ImageColumn | None = None
    form: CsvForm = PLAIN_CSV

    def chunks(self) -> Iterator[Chunk]:
        """The rows of the input, some at a time."""
        return read_chunks(self.file, self.form) if self.images is None else self.images.chunks(self.file)

    def written(self, chunk: Chunk) -> Chunk:
        """The rows as the output has them: without the bytes of images where it is a file of text."""
        if self.images is None or self.out.suffix.lower() == ".parquet":
            return chunk
        return self.images.without_bytes(chunk)


def plan_prediction(
    folder: str | Path,
    file: str | Path,
    out: str | Path,
    *,
    text: Sequence[str] | None = None,
    probabilities: bool = False,
    round: int | None = None,
    new_tokens: int | None = None,
    image: str | None = None,
) -> PredictionPlan:
    """The plan of `predict_file`, with its arguments. Reads the input once. Raises UserError for what is wrong."""
    folder, file, out = (Path(path).expanduser() for path in (folder, file, out))
    require_rounds(folder, round)
    recipe = load_recipe(folder / "recipe.yaml")
    asks, looks = recipe.data.task == CAUSAL_LM, reads_images(recipe.data)
    require_table(file, folder=looks)
    require_new_table(out, file)
    _check_options(asks, probabilities, new_tokens)
    form = csv_form(recipe.data)
    images = _images(recipe, file, image, text) if looks else None
    columns = () if asks or looks else text_columns(recipe, text, image)
    if images is not None:
        column = {images.name: "--image"}
        table = outline_of(file, images.chunks(file), column, lambda chunk, _: images.check(chunk))
    else:
        table = outline(file, columns, form)
    questions = find_questions(recipe.data, file, table.names, text) if asks else None
    if questions is not None:
        for chunk in read_chunks(file, form):
            questions.of(chunk)
    reserved = [name for name in table.names if name == PREDICTION or (probabilities and name.startswith(PROBABILITY))]
    if reserved:
        raise UserError(f"{file}: has a column '{reserved[0]}' already, which predict adds; rename it")
    most = new_tokens or recipe.eval.new_tokens
    return PredictionPlan(folder, file, out, columns, table, probabilities, round, questions, most, images, form)


def _images(recipe: Recipe, file: Path, image: str | None, text: Sequence[str] | None) -> ImageColumn:
    size = recipe.data.image_size
    assert size is not None, "a run's recipe has the size of its images"
    require_pillow()
    return ImageColumn.of(file, image_column(recipe, file, image, text), size, csv_form(recipe.data))


def _check_options(asks: bool, probabilities: bool, new_tokens: int | None) -> None:
    if asks and probabilities:
        raise UserError("--probabilities: the run trained a language model, which has no classes; leave it out")
    if new_tokens is not None and not asks:
        raise UserError("--new-tokens: the run trained no language model, whose answers have tokens; leave it out")
    if new_tokens is not None and new_tokens < 1:
        raise UserError(f"--new-tokens={new_tokens}: expected at least 1")
