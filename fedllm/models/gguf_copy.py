"""Copies of GGUF models as plain transformers folders, in the user's cache.

transformers reads a GGUF file three times: for the config, for the tokenizer and for the weights, which it also
dequantises. A copy is made once and then read. It gives the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from fedllm.common.errors import UserError
from fedllm.common.files import digest, write_text

_FORMAT = 1  # of the copies; another number makes new ones
_LIST = "copy.json"


@dataclass(frozen=True)
class GgufCopy:
    """folder: the copy, or None where there is none. note: what a user should know of it, "" if nothing."""

    folder: Path | None
    note: str = ""


class _CacheError(Exception):
    """The cache cannot be written."""


def cache_folder() -> Path:
    """The folder of all copies: fedllm/gguf in XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedllm" / "gguf"


def copy_of(file: Path) -> GgufCopy:
    """The copy of a GGUF model, with its dequantised weights in float32. It is made if it is not there.

    Its name is a digest of the file, of the versions of transformers and gguf, and of the format of copies. It is used
    only if its files have the digests that they were written with, and made again otherwise. Of several processes one
    makes it, and the others wait. There is no copy where the cache cannot be written, and none of a model that is no
    causal language model.
    Raises UserError without the package gguf, and what transformers raises for a file that it cannot read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file}: reading it needs gguf; run: pip install fedllm[gguf]")
    folder = cache_folder() / _key(digest(file))
    if _is_whole(folder):
        return GgufCopy(folder)
    try:
        with _locked(folder.with_name(f"{folder.name}.lock")):
            return GgufCopy(folder) if _is_whole(folder) else _make(file, folder)
    except _CacheError as error:
        return GgufCopy(None, f"{file.name} is converted anew for each run: {error}")


def require_copy(file: Path, quantize: str) -> GgufCopy:
    """The copy of a GGUF model that is to be quantised. Raises UserError where there is none."""
    copy = copy_of(file)
    if copy.folder is None:
        why = copy.note or "it is no causal language model"
        raise UserError(f"model.quantize: {quantize} of {file} needs its copy as safetensors, and there is none: {why}")
    return copy


def _key(of_file: str) -> str:
    made = f"{of_file} transformers {version('transformers')} gguf {version('gguf')} format {_FORMAT}"
    return hashlib.sha256(made.encode()).hexdigest()[:32]


def _make(file: Path, folder: Path) -> GgufCopy:
    """Converts the file. The folder appears when it is complete. Raises _CacheError where it cannot be written."""
    with _writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        if (found := _read(file)) is None:
            return GgufCopy(None)
        with _writing(folder.parent):
            for part in found:
                part.save_pretrained(str(aside))
            files = {path.name: digest(path) for path in sorted(aside.iterdir())}
            size = sum(path.stat().st_size for path in aside.iterdir())
            write_text(aside / _LIST, json.dumps({"source": file.name, "files": files}, indent=2) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    where = f"{folder} ({size / 1e6:,.0f} MB)"
    return GgufCopy(folder, f"{file.name} was converted, once for all runs, to {where}, which may be deleted")


def _read(file: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel] | None:
    """A GGUF file's tokenizer and model; None if it is no causal language model."""
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(str(file.parent), **options)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **options)
    if hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), config=config, dtype=torch.float32, **options)
    return tokenizer, model


def _is_whole(folder: Path) -> bool:
    """Whether every file of a copy has the digest that it was written with."""
    try:
        files = json.loads((folder / _LIST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(digest(folder / name) == wanted for name, wanted in files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors and tokenizers have types of their own for a full disk
        raise _CacheError(f"{folder} cannot be written: {error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for a lock that ends with its process. Where none can be had, several processes may convert at once."""
    lock = FileLock(path, fallback_to_soft=False)
    with contextlib.suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
