"""Layers of a recipe are merged key by key; files, pipes and private keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.common.errors import UserError
from fedllm.config.recipe import LocalSettings

SMALL = "data: {name: glue/sst2}\nalgorithm: {name: fadamgc}\n"


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_several_keys_of_a_section_leave_the_others_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "run: {seed: 4, threads: 2}\nlocal: {epochs: 2, batch_size: 3}\n")
    changed = load_recipe(path, ["run={seed: 5}", "run={timeout: 9}"])
    assert (changed.run.seed, changed.run.threads, changed.run.timeout) == (5, 2, 9)
    assert load_recipe(path, ["local={batch_size: 7}"]).local == LocalSettings(epochs=2, batch_size=7)


def test_local_steps_take_the_place_of_the_epochs_of_a_lower_layer(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "local: {epochs: 2, batch_size: 3}\n")
    for words in (["local.steps=4"], ["local={steps: 4}"], ["local={steps: 4, epochs: null}"]):
        assert load_recipe(path, words).local == LocalSettings(steps=4, batch_size=3)
    with pytest.raises(UserError, match="found both epochs=1 and steps=4"):
        load_recipe(path, ["local.epochs=1", "local.steps=4"])


def test_top_level_keys_for_anchors_are_ignored(tmp_path: Path) -> None:
    text = "x-common: &c {rank: 3}\ndata: {name: glue/sst2}\nalgorithm: fedavg\nlora: *c\n"
    assert load_recipe(write(tmp_path, text)).lora.rank == 3


def test_a_recipe_may_come_from_a_pipe_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, SMALL, "base.yaml")
    monkeypatch.chdir(tmp_path)
    for rank in (3, 5):  # the second pipe has the path of the first
        reading, writing = os.pipe()
        os.write(writing, b"extends: base.yaml\nlora: {rank: %d}\n" % rank)
        os.close(writing)
        try:
            assert [load_recipe(f"/dev/fd/{reading}").lora.rank for _ in range(2)] == [rank, rank]
        finally:
            os.close(reading)
