"""GGUF models are converted once, and their copies give the same bits."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
from tiny_gguf import TEMPLATE, save_gguf

from fedllm.common.errors import UserError
from fedllm.models import gguf_copy, loading
from fedllm.models.fingerprint import fingerprint
from fedllm.models.gguf_copy import GgufCopy, cache_folder, copy_of
from fedllm.models.loading import Backbone, load_backbone
from fedllm.models.lora import attach_lora
from fedllm.models.settings import LoraSettings, ModelSettings
from fedllm.tasks.heads import Head, language_head, sequence_head

HEADS = {"classifier": sequence_head(3), "language": language_head()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedllm" / "gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def load(file: Path, head: Head, **model: Any) -> Backbone:
    return load_backbone(ModelSettings(name=str(file), **model), head)


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are converted from now on."""
    found: list[Path] = []
    read = gguf_copy._read
    monkeypatch.setattr(gguf_copy, "_read", lambda path: (found.append(path), read(path))[1])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_the_copy_gives_the_bits_of_the_file(
    file: Path, head: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = load(file, HEADS[head], dtype=dtype)
    monkeypatch.setattr(loading, "copy_of", lambda _: GgufCopy(None))
    read = load(file, HEADS[head], dtype=dtype)
    ours, theirs = copied.model.state_dict(), read.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype for name, value in ours.items())
    text = "<|im_start|>user\nthe then über\n\n 1<|im_end|>"
    for tokenizer in (copied.tokenizer, read.tokenizer):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert (tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token) == (TEMPLATE, *["<|im_end|>"] * 2)
    assert copied.tokenizer(text).input_ids == read.tokenizer(text).input_ids
    assert (copied.source, copied.base_name) == (read.source, read.base_name) == (file, str(file.parent))
    configs = [backbone.model.config.to_dict() | {"architectures": None} for backbone in (copied, read)]
    assert configs[0] == configs[1]
    assert fingerprint(copied.model) == fingerprint(read.model)


def test_a_file_is_converted_once_and_the_first_load_says_so(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = conversions(monkeypatch)
    first = load(file, HEADS["language"])
    again = [load(file, head) for head in HEADS.values()]
    assert converted == [file]
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert first.notes == (f"tiny.gguf was converted, once for all runs, to {folder} (0 MB), which may be deleted",)
    assert all(backbone.notes == () for backbone in again)


def test_another_file_or_version_is_another_copy(
    file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copy_of(file).folder
    assert copy_of(shutil.copy(file, tmp_path / "same.gguf")).folder == first
    assert copy_of(save_gguf(tmp_path / "other.gguf", seed=4)).folder != first
    monkeypatch.setattr(gguf_copy, "version", lambda package: "99")
    assert copy_of(file).folder != first
    assert sum(path.is_dir() for path in cache.iterdir()) == 3


@pytest.mark.parametrize("damage", ["changed", "lacking", "no list"])
def test_a_damaged_copy_is_made_anew(file: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of(file).folder
    assert folder is not None
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    if damage == "changed":
        weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    else:
        (weights if damage == "lacking" else folder / "copy.json").unlink()
    converted = conversions(monkeypatch)
    assert copy_of(file).folder == folder
    assert converted == [file]
    assert weights.read_bytes() == before


def test_of_several_at_once_one_converts(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = conversions(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(copy_of, [file] * 3))
    assert converted == [file]
    assert len({copy.folder for copy in found}) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


def test_without_a_cache_the_file_is_read_and_a_note_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    backbone = load(file, HEADS["language"])
    (note,) = backbone.notes
    assert note.startswith(f"tiny.gguf is converted anew for each run: {cache_folder()} cannot be written: ")
    with pytest.raises(UserError, match=r"4bit of .*tiny\.gguf needs its copy as safetensors, and there is none"):
        load(file, HEADS["language"], quantize="4bit")


def test_a_failed_copy_leaves_nothing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_copy, "write_text", full)
    copy = copy_of(file)
    assert copy.folder is None
    assert "No space left on device" in copy.note
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_file_that_is_none_or_a_part_of_one(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for content in (b"GGUF, or not", whole[:2000], whole[:-100], b"not so"):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"model\.gguf\) cannot be loaded: "):
            load(tmp_path / "model.gguf", HEADS["language"])


def test_without_the_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reading it needs gguf; run: pip install fedllm\[gguf\]"):
        load(file, HEADS["language"])


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_gguf_file_is_quantised_through_its_copy(file: Path, quantize: str) -> None:
    """The head stays as it is, and the weights are those of the file, rounded."""
    bnb = pytest.importorskip("bitsandbytes")
    kind = bnb.nn.Linear4bit if quantize == "4bit" else bnb.nn.Linear8bitLt
    plain, low = load(file, HEADS["language"]), load(file, HEADS["language"], quantize=quantize)
    layers = {name for name, module in low.model.named_modules() if isinstance(module, kind)}
    assert len(layers) == 2 * 7
    assert torch.equal(low.model.lm_head.weight, plain.model.lm_head.weight)
    inputs = {"input_ids": torch.tensor([[1, 40, 50, 60, 2]])}
    with torch.no_grad():
        first, second = (each.model(**inputs).logits for each in (plain, low))
    assert torch.cosine_similarity(first.flatten(), second.flatten(), dim=0) > 0.9
    model = attach_lora(low, LoraSettings(rank=2))
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
