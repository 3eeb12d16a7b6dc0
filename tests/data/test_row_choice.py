"""The form of CSV files, rows without a value, and new names of labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedllm.common.errors import UserError
from fedllm.data.arrow_files import CsvForm
from fedllm.data.loading import load_dataset
from fedllm.data.row_stream import read_chunks
from fedllm.data.settings import DataSettings

ROWS = [("größer; und, mehr", "oui"), ("klein", "non"), ("mittel", "oui"), ("schön", "non"), ("naß", "oui")]


def written(folder: Path, encoding: str = "utf-8", mark: str = ",", rows=ROWS, name: str = "train.csv") -> Path:
    lines = [["text", "label"], *rows]
    text = "".join(mark.join('"' + cell + '"' if cell else "" for cell in line) + "\n" for line in lines)
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def loaded(path: Path, **keys: object):
    return load_dataset(DataSettings(train=str(path), validation=None, holdout=0.4, **keys))  # type: ignore[arg-type]


def texts(dataset) -> list[str]:
    return sorted([*dataset.train.texts[0], *dataset.validation.texts[0]])


@pytest.mark.parametrize(
    ("encoding", "mark"), [("cp1252", ","), ("utf-16", ","), ("utf-8-sig", ";"), ("latin-1", "|"), ("utf-8", "\t")]
)
def test_a_csv_in_another_form_has_the_same_samples(tmp_path: Path, encoding: str, mark: str) -> None:
    expected = loaded(written(tmp_path))
    path = written(tmp_path, encoding, mark, name="other.csv")
    found = loaded(path, encoding=encoding, delimiter=mark)
    assert texts(found) == texts(expected) == sorted(text for text, _ in ROWS)
    assert found.train.fingerprint() == expected.train.fingerprint()
    (chunk,) = read_chunks(path, CsvForm(encoding, mark))
    assert [(row["text"], row["label"]) for row in chunk.records] == ROWS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"train\.csv: not utf-8 text \(byte \d+\); set data\.encoding, or save it as UTF-8"),
        ({"encoding": "ascii"}, r"train\.csv: not ascii text"),
        ({"encoding": "cp1252", "delimiter": ";"}, r"separated by commas, expected semicolons; set data\.delimiter"),
        ({"encoding": "utf-9"}, r"data\.encoding=utf-9: no known encoding of text"),
        ({"encoding": "base64"}, r"data\.encoding=base64: no known encoding of text"),
        ({"delimiter": ";;"}, r"data\.delimiter=';;': expected one ASCII character"),
        ({"delimiter": '"'}, r"data\.delimiter='\"': expected one ASCII character"),
        ({"label_map": {}}, r"data\.label_map: found {}, expected {old: new}"),
        ({"label_map": {"1": "a"}, "regression": True}, r"data\.label_map: .* found a regression"),
        ({"label_map": {"1": "a"}, "task": "causal_lm"}, r"data\.label_map: .* found conversations"),
        ({"drop_missing": True, "task": "causal_lm"}, r"data\.drop_missing: .* found conversations"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    path = written(tmp_path, "cp1252")
    with pytest.raises(UserError, match=message):
        loaded(path, **keys)


def test_rows_without_a_value_are_left_out_with_their_number(tmp_path: Path) -> None:
    path = written(tmp_path, rows=[*ROWS, ("", "oui"), ("ohne", ""), ("  ", "non")])
    with pytest.raises(UserError, match="1 of 8 rows has no value, the first is row 6"):
        loaded(path)
    found = loaded(path, drop_missing=True)
    assert texts(found) == sorted(text for text, _ in ROWS)
    assert found.train.fingerprint() == loaded(written(tmp_path, name="whole.csv")).train.fingerprint()
    assert f"{path}: left out 3 of 8 rows (2 without 'text', 1 without 'label'); errors count the rest" in found.notes
    assert loaded(written(tmp_path, name="whole.csv"), drop_missing=True).notes == ()


def test_a_table_of_missing_values_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.drop_missing leaves no row: 2 without 'label' of 2 rows"):
        loaded(written(tmp_path, rows=[("a", ""), ("b", "")]), drop_missing=True)


def test_labels_get_new_names(tmp_path: Path) -> None:
    plain = loaded(written(tmp_path))
    found = loaded(written(tmp_path), label_map={"oui": "yes", "non": "no", "si": "yes"})
    assert (plain.classes, found.classes) == (("non", "oui"), ("no", "yes"))
    assert found.train.labels.tolist() == plain.train.labels.tolist()
    (note,) = found.notes
    assert "column 'label': no row has 'si'; its labels: 'non', 'oui'" in note


def test_several_labels_become_one_and_numbers_become_words(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": n % 5} for n in range(20)]
    path = tmp_path / "stars.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = loaded(path, label_map={"0": "bad", "1": "bad", "2": "middling", "3": "good", "4": "good"})
    assert found.classes == ("bad", "good", "middling")
    names = [found.classes[label] for label in found.train.labels]
    stars = [int(text.split()[1]) % 5 for text in found.train.texts[0]]
    assert names == [("bad", "bad", "middling", "good", "good")[star] for star in stars]
