"""Evaluates the model of a run, on the run's own validation split or on a labelled file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedllm.common.console import say_all, stage
from fedllm.common.errors import UserError, cut_name
from fedllm.config.own_files import require_own_files
from fedllm.data.conversations.reading import read_conversation_file
from fedllm.data.image_decoding import decode_images
from fedllm.data.image_files import read_image_table
from fedllm.data.image_reading import folder_of
from fedllm.data.known_datasets import label_column
from fedllm.data.known_images import image_columns, reads_images
from fedllm.data.labels import encode_as
from fedllm.data.loading import Split
from fedllm.data.row_choice import csv_form, prepared
from fedllm.data.settings import CAUSAL_LM
from fedllm.data.table_paths import require_table
from fedllm.data.tables import read_table
from fedllm.experiment.inference import Inference
from fedllm.experiment.recipe_data import read_data
from fedllm.experiment.sample_columns import image_column, text_columns
from fedllm.experiment.trained import TrainedRun, load_trained
from fedllm.tasks.class_scores import ClassScores


@dataclass(frozen=True)
class RunEvaluation:
    """The scores of a run's model. round: after which round. data: the file, or "validation split".

    scores: the loss and the task's scores by name; None where one is not finite. by_class: see ClassScores; None where
    the targets are no classes.
    """

    run: Path
    round: int
    data: str
    samples: int
    scores: dict[str, float | None]
    by_class: ClassScores | None = None

    def __str__(self) -> str:
        return f"{self.run} after round {self.round}, on {self.data}: {self.samples:,} samples"

    def table(self) -> Table:
        """The scores as a table for the terminal."""
        made = Table("score", Column("value", justify="right"), box=SIMPLE_HEAD)
        for name, value in self.scores.items():
            made.add_row(name, "-" if value is None else f"{value:.4f}")
        return made

    def class_table(self) -> Table | None:
        """Recall, precision and AUROC of each class as a table for the terminal; None without classes."""
        if (found := self.by_class) is None:
            return None
        numbers = [Column(name, justify="right") for name in ("samples", "recall", "precision", "AUROC")]
        made = Table(Column("class", overflow="fold"), *numbers, box=SIMPLE_HEAD)
        rows = zip(found["names"], found["samples"], found["recall"], found["precision"], found["auroc"], strict=True)
        for name, samples, *scores in rows:
            cells = ["-" if value is None else f"{value:.4f}" for value in scores]
            made.add_row(escape(cut_name(name)), f"{samples:,}", *cells)
        return made

    def to_json(self) -> dict[str, Any]:
        """As `fedllm evaluate --out` writes it."""
        return {
            "run": str(self.run),
            "round": self.round,
            "data": self.data,
            "samples": self.samples,
            "scores": self.scores,
            "by_class": self.by_class,
        }


def evaluate_run(
    folder: str | Path,
    file: str | Path | None = None,
    *,
    text: Sequence[str] | None = None,
    label: str | None = None,
    round: int | None = None,
    image: str | None = None,
) -> RunEvaluation:
    """Evaluates the adapter of a run's newest checkpoint, or of `round`; the same as `fedllm evaluate`.

    file: labelled samples (CSV, JSON lines or parquet, or a folder with a folder of texts or images per class); None
    for the run's own validation split, which gives the scores of its result.json up to rounding. text, image, label:
    the file's columns, by default those of the run's own data.
    Raises UserError: no run with a checkpoint, another validation split than the run's, a file without these columns,
    labels that the model does not know.
    """
    if file is None and (text or label or image):
        raise UserError(
            "--text, --image and --label name columns of a file: found none, expected fedllm evaluate RUN FILE"
        )
    if file is not None:
        require_table(Path(file), folder=True)
    run = load_trained(folder, round)
    split, notes = _own_split(run) if file is None else _read_split(run, Path(file), text, label, image)
    say_all(notes, ())
    model = Inference(run)
    with stage("evaluating", at_once=True):
        tokens = model.tokens(split)
        outputs = model.outputs(tokens)
        scores = run.task.evaluate(outputs, tokens.targets)
        by_class = run.task.by_class(outputs, tokens.targets)
    finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    data = "validation split" if file is None else str(file)
    return RunEvaluation(run.folder, run.round, data, len(split), finite, by_class)


def _own_split(run: TrainedRun) -> tuple[Split, tuple[str, ...]]:
    """The run's validation split. Raises UserError if it is not what the run was evaluated on."""
    recipe = run.recipe
    require_own_files(recipe)
    dataset = read_data(recipe)
    found, before = dataset.validation.fingerprint(), run.data.get("validation")
    if dataset.classes != run.task.classes or (before is not None and found != before):
        raise UserError(
            f"{run.folder}: the data are not what they were: the run was evaluated on another validation split "
            f"(sha256 {str(before)[:12]}, now {found[:12]}); put the data back, or name a file to evaluate on"
        )
    return dataset.validation, ()


def _read_split(
    run: TrainedRun, file: Path, text: Sequence[str] | None, label: str | None, image: str | None
) -> tuple[Split, tuple[str, ...]]:
    if run.recipe.data.task == CAUSAL_LM:
        if text or label or image:
            raise UserError(
                "--text, --image and --label: the run learned conversations, whose columns its recipe names; leave out"
            )
        split, told = read_conversation_file(run.recipe.data, file)
        return split, tuple(told)
    if reads_images(run.recipe.data):
        return _read_images(run, file, text, label, image)
    columns = text_columns(run.recipe, text, image)
    label = label or label_column(run.recipe.data)
    if label in columns:
        raise UserError(f"--label={label}: is a column of text as well; expected another column")
    table = read_table(file, text=columns, label=label, form=csv_form(run.recipe.data))
    table = prepared(run.recipe.data, table, columns, label)
    texts = [table.texts(column, "--text") for column in columns]
    labels, notes = encode_as(table, label, run.task.classes, "--label")
    return Split(texts, labels, {}), (*table.notes, *notes)


def _read_images(
    run: TrainedRun, file: Path, text: Sequence[str] | None, label: str | None, image: str | None
) -> tuple[Split, tuple[str, ...]]:
    own_image, own_label = image_columns(run.recipe.data)
    if not file.is_dir():
        own_image = image_column(run.recipe, file, image, text)
    elif text or label or image:
        raise UserError(f"--text, --image and --label name columns of a table: found the folder {file}; leave out")
    label = label or own_label
    if label == own_image:
        raise UserError(f"--label={label}: is the column of images as well; expected another column")
    table = read_image_table(file, image=own_image, label=label)
    labels, notes = encode_as(table, label, run.task.classes, "--label")
    images = decode_images(table, own_image, run.recipe.data.image_size, folder_of(table), key="--image")
    return Split([], labels, {}, images=images), (*table.notes, *notes)
