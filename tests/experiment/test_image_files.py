"""`fedllm predict` and `fedllm evaluate` on images: tables, folders, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
import torch
from PIL import Image
from tiny_images import CLASSES, SIDE, coloured, encoded, save_model, write_folders, write_parquet
from transformers import AutoModelForImageClassification, pipeline

from fedllm import UserError, evaluate_run, export_merged, load_predictor, predict_file, run_recipe
from fedllm.cli.commands import main
from fedllm.data import image_stream
from fedllm.models.loading import load_backbone
from fedllm.models.settings import ModelSettings
from fedllm.tasks.heads import image_head

COUNT = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of all weights of a tiny ViT, with the files of its validation split beside it."""
    folder = tmp_path_factory.mktemp("image-files")
    save_model(folder / "vit", "vit", {"image_mean": [0.5] * 3, "image_std": [0.25] * 3})
    write_parquet(folder / "train.parquet", 48, seed=0, image="scan")
    write_parquet(folder / "validation.parquet", COUNT, seed=1, image="scan")
    recipe = f"""
model: {{name: {folder / "vit"}}}
lora: null
data:
  task: image_classification
  image: scan
  train: {folder / "train.parquet"}
  validation: {folder / "validation.parquet"}
partition: {{clients: 2, scheme: iid}}
algorithm: {{name: localadamw, lr: 3.0e-3}}
federation: {{rounds: 2}}
local: {{steps: 4, batch_size: 8}}
run: {{threads: 1, precision: float32, trackers: []}}
"""
    (folder / "recipe.yaml").write_text(recipe)
    return run_recipe(folder / "recipe.yaml", run_dir=folder / "run").folder


def expected(run: Path) -> torch.Tensor:
    """Probabilities [n, 3] of the validation images, from plain transformers on the folder that the run wrote."""
    model = AutoModelForImageClassification.from_pretrained(run / "model").eval()
    assert [model.config.id2label[index] for index in range(3)] == CLASSES
    images, _ = coloured(COUNT, seed=1)
    with torch.no_grad():
        logits = model(pixel_values=(torch.from_numpy(images).float() / 255 - 0.5) / 0.25).logits
    return logits.softmax(dim=1)


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pa_parquet.read_table(path).to_pylist()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def agree(rows: list[dict[str, Any]], wanted: torch.Tensor) -> None:
    assert [row["prediction"] for row in rows] == [CLASSES[index] for index in wanted.argmax(dim=1)]
    for row, values in zip(rows, wanted.tolist(), strict=True):
        assert [float(row[f"probability_{name}"]) for name in CLASSES] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.slow
def test_predictions_are_those_of_transformers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """From parquet, five images at a time; a file of text has their paths, a parquet file all of the input."""
    monkeypatch.setattr(image_stream, "_MOST_BYTES", 5 * 3 * SIDE**2)
    source, out = run.parent / "validation.parquet", tmp_path / f"out{suffix}"
    done = predict_file(run, source, out, probabilities=True)
    rows = read(out)
    assert (done.rows, len({row["prediction"] for row in rows})) == (COUNT, 3)
    agree(rows, expected(run))
    if suffix == ".parquet":
        assert pa_parquet.read_table(out).select(["scan", "label"]).to_pylist() == read(source)
    else:
        assert [row["scan"] for row in rows] == [f"{row}.png" for row in range(COUNT)]


@pytest.mark.slow
def test_a_folder_and_a_csv_of_paths_have_the_same_predictions(run: Path, tmp_path: Path) -> None:
    """In class folders, with a hidden file among them; and images of another size, which are resized."""
    folder = write_folders(tmp_path / "own", COUNT, seed=1)
    (folder / ".thumb.png").write_bytes(b"no image")
    assert main(["predict", str(run), str(folder), "--out", str(tmp_path / "out.csv"), "--probabilities"]) == 0
    rows = read(tmp_path / "out.csv")
    assert [row["file"] for row in rows] == sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*"))
    agree(sorted(rows, key=lambda row: int(Path(row["file"]).stem)), expected(run))

    lines = [f"{number:03},own/{row['file']}" for number, row in enumerate(rows)]
    (tmp_path / "paths.csv").write_text("\n".join(["id,picture", *lines]))
    words = ["predict", str(run), str(tmp_path / "paths.csv"), "--out", str(tmp_path / "again.csv")]
    assert main([*words, "--image", "picture"]) == 0
    again = read(tmp_path / "again.csv")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in rows]
    assert again[1]["id"] == "001"

    large = tmp_path / "large"
    large.mkdir()
    pixels = coloured(COUNT, seed=1)[0][0]
    Image.fromarray(pixels.transpose(1, 2, 0)).resize((64, 40)).save(large / "one.png")
    assert predict_file(run, large, tmp_path / "one.jsonl").rows == 1


def test_arrays_in_memory(run: Path) -> None:
    model, images = load_predictor(run), coloured(COUNT, seed=1)[0]
    found = model.predict_images(images)
    assert found.probabilities is not None
    assert (found.probabilities - expected(run)).abs().max() < 1e-5
    with pytest.raises(UserError, match=r"found an array uint8 \[12, 3, 8, 16\], expected uint8 \[n, 3, 16, 16\]"):
        model.predict_images(images[:, :, :8])
    with pytest.raises(UserError, match="found texts, expected images"):
        model.predict(["a text"])


def test_evaluation_of_files_and_folders_gives_the_scores_of_the_split(run: Path, tmp_path: Path) -> None:
    final = json.loads((run / "result.json").read_text())["final"]
    folder = write_folders(tmp_path / "own", COUNT, seed=1)
    table = pa.table(
        {
            "picture": [encoded(image) for image in coloured(COUNT, seed=1)[0]],
            "finding": (np.arange(COUNT) % 3).tolist(),
        }
    )
    pa_parquet.write_table(table, tmp_path / "v.parquet")
    assert evaluate_run(run, run.parent / "validation.parquet").scores == pytest.approx(final, abs=1e-5)
    assert evaluate_run(run, folder).scores == pytest.approx(final, abs=1e-5)
    found = evaluate_run(run, tmp_path / "v.parquet", image="picture", label="finding")
    assert found.scores == pytest.approx(final, abs=1e-5)
    assert found.samples == COUNT


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "no such column": ("in.csv", ["--image", "scans"], "--image: "),
    "texts": ("in.csv", ["--text", "scan"], "--text=scan: found a run on images, expected one on texts"),
    "a column of a folder": ("images", ["--image", "scan"], "--image=scan: is for a column of a table"),
    "no images": ("empty", [], "empty: expected images in the folder (.png,"),
    "no value": ("gap.csv", [], "gap.csv, row 2, column 'scan': found no value, expected the bytes of an image"),
    "no such image": ("gone.csv", [], "gone.csv, row 1, column 'scan' (gone.png): no such image in"),
    "a text": ("text.csv", [], "text.csv, row 1, column 'scan': no such image in"),
    "a number": ("number.jsonl", [], "row 1, column 'scan': found a value of type int, expected the bytes"),
    "no image": ("images/../bad.csv", [], "row 1, column 'scan' (bad.png): is no image that can be read"),
    "a damaged image": ("torn.csv", [], "row 2, column 'scan' (torn.png): is no image that can be read"),
    "tokens": ("in.csv", ["--new-tokens", "3"], "--new-tokens: the run trained no language model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_predict(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "empty").mkdir()
    content = encoded(coloured(1, 0)[0][0], "JPEG")
    for name in ("images/a.jpg", "a.jpg"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "torn.png").write_bytes(content[: len(content) // 2])
    texts = {
        "in.csv": "scan\na.jpg\n", "gap.csv": "id,scan\n1,a.jpg\n2,\n", "gone.csv": "scan\ngone.png\n",
        "text.csv": "scan\nthe patient is ill\n", "number.jsonl": '{"scan": 5}\n', "bad.csv": "scan\nbad.png\n",
        "torn.csv": "scan\na.jpg\ntorn.png\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    file, words, said = MISTAKES[mistake]
    out = tmp_path / "out.csv"
    assert main(["predict", str(run), str(tmp_path / file), "--out", str(out), *words]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert said in error
    assert "Traceback" not in error
    assert "the patient" not in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("columns", "words", "said"),
    [
        ({"scan": "x", "label": "green"}, ["--image", "label"], "--label=label: is the column of images as well"),
        ({"scan": "x", "label": "pink"}, [], "1 of 1 rows have a label that the model does not know, the first is 'pi"),
        ({"picture": "x", "label": "green"}, [], "--image: "),
        ({"scan": "x"}, [], "--label: "),
    ],
)
def test_mistakes_of_evaluate(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, str], words: list[str], said: str
) -> None:
    pa_parquet.write_table(pa.table({name: [value] for name, value in columns.items()}), tmp_path / "v.parquet")
    assert main(["evaluate", str(run), str(tmp_path / "v.parquet"), *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_a_run_on_texts_has_no_images(tiny: Path, tmp_path: Path) -> None:
    words = ["federation.rounds=1", "run.threads=1", "run.trackers=[]", "local.steps=1", "local.epochs=null"]
    texts = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    for call in (
        lambda: predict_file(texts, tiny / "validation.csv", tmp_path / "out.csv", image="scan"),
        lambda: evaluate_run(texts, tiny / "validation.csv", image="scan"),
    ):
        with pytest.raises(UserError, match="--image=scan: found a run on texts"):
            call()
    with pytest.raises(UserError, match=r"expected one of \.csv"):
        predict_file(texts, write_folders(tmp_path / "images", 3, 0), tmp_path / "out.csv")


def test_the_models_folder_says_how_images_are_read(run: Path, tmp_path: Path) -> None:
    """So transformers' pipeline gives the run's own answers, and a run that starts from the folder the run's inputs."""
    images = load_backbone(ModelSettings(name=str(run / "model")), image_head(CLASSES, SIDE)).images
    assert images is not None
    assert (images.mean, images.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    pixels, _ = coloured(COUNT, seed=1)
    shown = [Image.fromarray(image) for image in pixels.transpose(0, 2, 3, 1)]
    answers = pipeline("image-classification", str(run / "model"))(shown)
    for row, answer in zip(expected(run), answers, strict=True):
        given = {each["label"]: each["score"] for each in answer}
        assert [given[name] for name in CLASSES] == pytest.approx(row.tolist(), abs=1e-5)


def test_a_merged_model_says_how_images_are_read(run: Path, tmp_path: Path) -> None:
    """Also where the base says nothing: then the data's own mean and deviation, or 0.5, count."""
    save_model(tmp_path / "vit", "vit")
    text = (run.parent / "recipe.yaml").read_text()
    text = text.replace("lora: null", "lora: {rank: 2}").replace(str(run.parent / "vit"), str(tmp_path / "vit"))
    (tmp_path / "recipe.yaml").write_text(text)
    adapted = run_recipe(tmp_path / "recipe.yaml", run_dir=tmp_path / "run").folder
    for folder in (adapted / "adapter", export_merged(adapted)):
        told = json.loads((folder / "preprocessor_config.json").read_text())
        assert told["image_mean"] == told["image_std"] == [0.5, 0.5, 0.5]
        assert told["size"] == {"height": SIDE, "width": SIDE}
    images = load_backbone(ModelSettings(name=str(adapted / "merged")), image_head(CLASSES, SIDE)).images
    assert images is not None
    assert images.mean == (0.5, 0.5, 0.5)
