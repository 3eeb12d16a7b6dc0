"""Folders with a file or a folder per client."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm.common.errors import UserError
from fedllm.data.loading import Dataset, load_dataset
from fedllm.data.partition_file import get_partition
from fedllm.data.settings import DataSettings, PartitionSettings

ROWS = {"berlin": ["red fox,a", "blue fox,b"], "rome": ["old cat,b", "new cat,a", "cat,a"], "7": ["a dog,b"]}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sites(folder: Path, **more: str) -> Path:
    files = {f"{name}.csv": "\n".join(["text,label", *rows, ""]) for name, rows in ROWS.items()}
    return write(folder, files | {"notes.md": "no table", ".hidden.csv": "x\n1\n"} | more)


def load(folder: Path, **settings: object) -> Dataset:
    given: dict[str, object] = {"train": str(folder), "validation": str(folder / "berlin.csv")}
    return load_dataset(DataSettings(**(given | settings)))  # type: ignore[arg-type]


def by_client(dataset: Dataset) -> list[list[str]]:
    parts = get_partition(PartitionSettings(scheme="by_column", column="client"), dataset)
    return [[dataset.train.texts[0][sample] for sample in part] for part in parts]


def test_a_file_per_client(tmp_path: Path) -> None:
    found = load(sites(tmp_path / "sites"))
    assert by_client(found) == [["a dog"], ["red fox", "blue fox"], ["old cat", "new cat", "cat"]]
    assert found.train.columns["client"] == ["7", "berlin", "berlin", "rome", "rome", "rome"]
    assert found.train.labels.tolist() == [1, 0, 1, 1, 0, 0]
    assert (found.name, found.classes) == ("sites", ("a", "b"))


def test_conversations_have_a_file_per_client(tmp_path: Path) -> None:
    lines = {name: f'{{"prompt": "say {name}", "completion": "{name}"}}\n' for name in "ab"}
    folder = write(tmp_path / "talks", {f"{name}.jsonl": line for name, line in lines.items()})
    found = load(folder, validation=str(folder / "a.jsonl"), task="causal_lm")
    parts = get_partition(PartitionSettings(scheme="by_column", column="client"), found)
    assert [part.tolist() for part in parts] == [[0], [1]]


def test_a_folder_of_class_folders_per_client(tmp_path: Path) -> None:
    files = {"rome/cats/1.txt": "old cat", "rome/dogs/1.txt": "a dog", "oslo/cats/1.txt": "new cat"}
    found = load(write(tmp_path / "sites", files), validation=None, holdout=0.01)
    held = [*found.validation.columns["client"], *found.train.columns["client"]]
    named = [*found.validation.columns["file"], *found.train.columns["file"]]
    assert sorted(zip(held, named, strict=True)) == [
        ("oslo", "oslo/cats/1.txt"),
        ("rome", "rome/cats/1.txt"),
        ("rome", "rome/dogs/1.txt"),
    ]


def test_a_folder_of_images_per_client(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for place, shade in (("x/cats/1.png", 10), ("x/dogs/1.png", 20), ("y/cats/1.png", 30), ("y/dogs/2.png", 40)):
        (tmp_path / "sites" / place).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8), (shade, 0, 0)).save(tmp_path / "sites" / place)
    found = load(tmp_path / "sites", task="image_classification", validation=str(tmp_path / "sites" / "x"))
    parts = get_partition(PartitionSettings(scheme="by_column", column="client"), found)
    assert found.train.images is not None
    assert [found.train.images[part, 0, 0, 0].tolist() for part in parts] == [[10, 20], [30, 40]]


def test_rows_left_out_are_those_of_their_client(tmp_path: Path) -> None:
    found = load(sites(tmp_path / "sites", **{"oslo.csv": "text,label\n,a\nfish,b\n"}), drop_missing=True)
    assert by_client(found)[2] == ["fish"]
    assert any("left out 1 of 8 rows (1 without 'text')" in note for note in found.notes)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"oslo.csv": "text,label\nfish,\n"}, "sites, column 'label': 1 of 7 rows has no value, .*row 1 of oslo.csv"),
        (
            {"oslo.csv": "text,kind\nfish,a\n"},
            "oslo.csv: found the columns 'text', 'kind', expected those of .*7.csv: ",
        ),
        ({"oslo.csv": "text,label,client\nfish,a,x\n"}, "oslo.csv: has a column 'client', .*rename the column"),
        ({"rome.jsonl": '{"text": "fish", "label": "a"}'}, "found two files or folders of client 'rome'"),
        (
            {"oslo.jsonl": '{"text": 5, "label": "a"}'},
            "sites, row 1 of oslo.jsonl, column 'text': found a value of typ",
        ),
        ({"oslo.csv": "text,label\n"}, "oslo.csv: the file holds no rows"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, more: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(sites(tmp_path / "sites", **more))


def test_a_class_that_the_training_split_lacks_is_named_by_its_file(tmp_path: Path) -> None:
    folder = sites(tmp_path / "sites")
    other = write(tmp_path / "later", {"a.csv": "text,label\nx,a\ny,b\n", "b.csv": "text,label\nz,a\nw,c\n"})
    with pytest.raises(UserError, match=r"later, row 2 of b.csv, column 'label': found 'c'"):
        load(folder, validation=str(other))
    write(other, {"b.csv": "text,label\n,a\nw,c\n"})
    with pytest.raises(UserError, match=r"later, row 1 of b.csv, column 'label': found 'c'"):
        load(folder, validation=str(other), drop_missing=True)
