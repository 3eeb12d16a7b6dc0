"""Another algorithm keeps the settings that it has; every spelling of a name has one meaning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.common.errors import UserError

OWN = "data: {name: glue/sst2}\nalgorithm: {name: fadamgc, lr: 0.5, schedule: linear, tracking_init: gradient}\n"
SPELLINGS = ("algorithm={}", "algorithm.name={}", "algorithm={{name: {}}}")


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_algorithm_keeps_the_settings_that_it_has(tmp_path: Path, spelling: str) -> None:
    path = write(tmp_path, OWN)
    kept = load_recipe(path, [spelling.format("fadamgc")])
    assert (kept.algorithm, kept.notes) == (load_recipe(path).algorithm, ())
    other = load_recipe(path, [spelling.format("fedadamw")])
    assert (other.algorithm["lr"], other.algorithm["schedule"]) == (0.5, "linear")
    assert "tracking_init" not in other.algorithm
    assert other.notes == (
        "algorithm fedadamw in place of fadamgc: takes over lr, schedule; drops tracking_init, which it does not have",
    )
    assert load_recipe(write(tmp_path, "extends: r.yaml\nalgorithm: fedadamw\n", "top.yaml")) == replace(
        other, name="top"
    )


def test_the_table_counts_more_than_what_was_given_for_another_algorithm(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "algorithms: {fedavg: {lr: 0.1}}\n")
    chosen = load_recipe(path, ["algorithm=fedavg"])
    assert (chosen.algorithm["lr"], chosen.algorithm["schedule"]) == (0.1, "linear")
    assert chosen.notes == (
        "algorithm fedavg in place of fadamgc: takes over schedule; drops tracking_init, which it does not have",
    )
    assert load_recipe(path).algorithm["lr"] == 0.5


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_is_given_with_a_name_counts_most_in_any_order(tmp_path: Path, spelling: str) -> None:
    path = write(tmp_path, OWN + "algorithms: {fedavg: {lr: 0.1}}\n")
    words = ["algorithm.lr=0.3", spelling.format("fedavg")]
    assert [load_recipe(path, given).algorithm["lr"] for given in (words, words[::-1])] == [0.3, 0.3]
    with pytest.raises(UserError, match=r"r\.yaml: algorithm\.tracking_init: unknown key"):
        load_recipe(path, ["algorithm.tracking_init=zero", spelling.format("fedavg")])


def test_of_two_names_the_last_one_counts_and_keeps_what_it_has(tmp_path: Path) -> None:
    words = ["algorithm={name: fedadamw, lr: 0.2, alpha: 0.1}", "algorithm=localadam"]
    chosen = load_recipe(write(tmp_path, OWN), words)
    assert (chosen.algorithm["name"], chosen.algorithm["lr"]) == ("localadam", 0.2)
    assert chosen.notes[0].startswith("algorithm localadam in place of fadamgc: takes over lr, schedule; drops")


def test_names_as_the_papers_write_them(tmp_path: Path) -> None:
    path = write(
        tmp_path, "data: {name: glue/sst2}\nalgorithm: FAdamGT\nalgorithms: {FedAvg: {lr: 0.7}, SCAFFOLD-M: {}}\n"
    )
    assert (load_recipe(path).algorithm["name"], load_recipe(path).name) == ("fadamgc", "r_fadamgc")
    assert load_recipe(path, ["algorithm=FedIT"]).algorithm["lr"] == 0.7
    assert load_recipe(path, ["algorithms={fedavg: {weight_decay: 1}}", "algorithm=fedavg"]).algorithm["lr"] == 0.7
    with pytest.raises(UserError, match=r"algorithms\.FedIT: is there under another name too"):
        load_recipe(write(tmp_path, OWN + "algorithms: {fedavg: {lr: 0.1}, FedIT: {lr: 0.2}}\n"))


def test_a_name_in_place_of_the_algorithm_is_short_for_its_key(tmp_path: Path) -> None:
    write(tmp_path, "data: {name: glue/sst2}\nalgorithm: {name: fadamgc, lr: 0.5, eps: 0.1}\n", "base.yaml")
    same = load_recipe(write(tmp_path, "extends: base.yaml\nalgorithm: fadamgc\n"))
    assert (same.name, same.algorithm["lr"]) == ("r", 0.5)
    write(tmp_path, "extends: base.yaml\nalgorithm: fedavg\n", "middle.yaml")
    kept = load_recipe(write(tmp_path, "extends: middle.yaml\nalgorithm: {lr: 0.25}\n"))
    assert (kept.algorithm["name"], kept.algorithm["lr"]) == ("fedavg", 0.25)
