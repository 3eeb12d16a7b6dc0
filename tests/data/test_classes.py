"""data.classes: the names of all classes and their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm.common.errors import UserError
from fedllm.data.loading import load_dataset
from fedllm.data.party_data import server_dataset, site_dataset
from fedllm.data.settings import DataSettings


def table(path: Path, *labels: str) -> Path:
    path.write_text("text,label\n" + "".join(f"words {row},{label}\n" for row, label in enumerate(labels)))
    return path


def settings(train: Path | None, *classes: str, **keys: object) -> DataSettings:
    given = None if train is None else str(train)
    return DataSettings(train=given, classes=list(classes) or None, **keys)  # type: ignore[arg-type]


def test_the_order_of_the_classes_is_that_of_the_recipe(tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", *"abab" * 5)
    found = load_dataset(settings(train, "b", "c", "a"))
    assert found.classes == ("b", "c", "a")
    assert {*found.train.labels.tolist(), *found.validation.labels.tolist()} == {0, 2}


def test_a_label_outside_is_named_by_file_and_row(tmp_path: Path) -> None:
    train = table(tmp_path / "train.csv", "a", "b", "zebra", "a")
    with pytest.raises(UserError, match=r"train\.csv, column 'label': 1 of 4 rows .* data\.classes does"):
        load_dataset(settings(train, "a", "b"))
    with pytest.raises(UserError, match="zebra' in row 3"):
        site_dataset(settings(None), train, None, ("a", "b"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"classes": ["a"]}, "expected two names or more"),
        ({"classes": ["a", "a"]}, "each of them once"),
        ({"classes": ["a", " "]}, "readable text"),
        ({"classes": ["a", "b"], "regression": True}, "has no classes"),
        ({"classes": ["a", "b"], "task": "causal_lm"}, "no labels"),
    ],
)
def test_classes_that_cannot_be(keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataSettings(train="x.csv", **keys)


def test_a_known_data_set_declares_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="declares its classes itself"):
        load_dataset(DataSettings(name="glue/sst2", classes=["a", "b"]))


def test_a_site_trains_on_all_its_rows_with_ids_or_names(tmp_path: Path) -> None:
    names, ids = table(tmp_path / "names.csv", "b", "a", "b"), table(tmp_path / "ids.csv", "1", "0", "1")
    for path in (names, ids):
        found = site_dataset(settings(None, max_validation=1), path, None, ("a", "b"))
        assert found.train.labels.tolist() == [1, 0, 1]
        assert found.stand_ins == {"validation"}
    found = site_dataset(settings(None), names, ids, ("a", "b"))
    assert (len(found.train), len(found.validation), found.stand_ins) == (3, 3, frozenset())


def test_a_server_reads_a_validation_split_or_nothing(tmp_path: Path) -> None:
    validation = table(tmp_path / "validation.csv", *"abba")
    found = server_dataset(settings(None, "b", "a", validation=str(validation)))
    assert found.validation.labels.tolist() == [1, 0, 0, 1]
    assert found.stand_ins == {"train"}
    found = server_dataset(settings(None, "b", "a"))
    assert found.classes == ("b", "a")
    assert found.stand_ins == {"train", "validation"}
    assert server_dataset(DataSettings(name=None, regression=True)).classes == ()
    with pytest.raises(UserError, match=r"data\.classes: missing; the server has no training samples"):
        server_dataset(settings(None))


def test_an_empty_file_of_a_site_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"empty\.csv"):
        site_dataset(settings(None), table(tmp_path / "empty.csv"), None, ("a", "b"))
