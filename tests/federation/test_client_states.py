"""Clients' vectors in memory and in files: the same to those who use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedllm.common.errors import RunError
from fedllm.common.tensors import State
from fedllm.federation.client_states import ClientFiles, ClientStore

D = 5


def initial(count: int) -> State:
    return {"c": torch.zeros(count, D), "v": torch.ones(count, 2)}


def rows(*values: float) -> State:
    c = torch.tensor(values)[:, None] + torch.arange(float(D))
    return {"c": c, "v": c[:, :2].square()}


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore:
    return ClientStore(initial) if request.param == "memory" else ClientFiles(initial, tmp_path)


def test_what_is_staged_counts_once_committed(store: ClientStore) -> None:
    staged = store.stage([3, 1], rows(10.0, 20.0))
    assert store.known() == {}
    assert torch.equal(store.get([1])["c"], torch.zeros(1, D))
    store.commit(staged)
    assert list(store.known()) == [1, 3]
    found = store.get([1, 2, 3])
    assert torch.equal(found["c"], torch.stack([rows(20.0)["c"][0], torch.zeros(D), rows(10.0)["c"][0]]))
    assert torch.equal(found["v"][1], torch.ones(2))
    assert store.nbytes() == 2 * 4 * (D + 2)


def test_the_store_keeps_its_own_copy(store: ClientStore) -> None:
    given = rows(1.0)
    store.put([0], given)
    given["c"].zero_()
    store.get([0])["c"].zero_()
    assert torch.equal(store.get([0])["c"], rows(1.0)["c"])


def test_vectors_that_are_one_tensor_are_kept_apart(store: ClientStore) -> None:
    one = rows(1.0, 2.0)["c"]
    store.put([0, 1], {"c": one, "v": one[:, :2]})
    assert torch.equal(store.get([1])["c"], one[1:])
    assert torch.equal(store.get([1])["v"], one[1:, :2])


def test_an_algorithm_without_client_vectors_keeps_nothing(store: ClientStore) -> None:
    store.put([0, 1], {})
    assert store.known() == {}


def test_one_file_a_client_of_what_is_known(tmp_path: Path) -> None:
    store = ClientFiles(initial, tmp_path)
    store.put([0, 1], rows(1.0, 2.0))
    (before,) = tmp_path.glob("1-*")
    store.put([1], rows(3.0))
    assert not before.exists(), "the file of before is gone"
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["0", "1"]
    (now,) = tmp_path.glob("1-*")
    assert torch.equal(load_file(now)["c"], rows(3.0)["c"][0])


@pytest.mark.parametrize("damage", ["gone", "torn", "other values"])
def test_a_file_that_is_not_what_was_written_is_named(tmp_path: Path, damage: str) -> None:
    store = ClientFiles(initial, tmp_path)
    store.put([7], rows(1.0))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-4] if damage == "torn" else content[:-1] + b"\x01")
    with pytest.raises(RunError, match=rf"{path}: the vectors of a client cannot be read"):
        store.get([7])


def test_files_of_a_checkpoint_get_names_of_their_own(tmp_path: Path) -> None:
    """So that neither outlives the other's end."""
    for name in ("checkpoint", "run"):
        (tmp_path / name).mkdir()
    before = ClientFiles(initial, tmp_path / "checkpoint")
    before.put([4], rows(1.0))
    store = ClientFiles(initial, tmp_path / "run")
    store.commit(before.known())
    before.put([4], rows(2.0))
    assert torch.equal(store.get([4])["c"], rows(1.0)["c"])
    (path,) = (tmp_path / "run").iterdir()
    store.put([4], rows(3.0))
    assert not path.exists()


def test_vectors_that_only_another_process_has_are_not_taken_for_none(store: ClientStore) -> None:
    store.put([2, 5], rows(1.0, 2.0))
    store.forget([5])
    assert list(store.known()) == [2]
    with pytest.raises(RuntimeError, match="client 5: another process has its vectors"):
        store.get([2, 5])
    store.put([5], rows(3.0))
    assert torch.equal(store.get([5])["c"], rows(3.0)["c"])


def test_the_file_of_forgotten_vectors_is_removed(tmp_path: Path) -> None:
    store = ClientFiles(initial, tmp_path)
    store.put([2], rows(1.0))
    store.forget([2])
    assert list(tmp_path.iterdir()) == []
