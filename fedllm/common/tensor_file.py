"""JSON and tensors together in one safetensors file, with a digest of both."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedllm.common.errors import UserError
from fedllm.common.files import replace_bytes
from fedllm.common.tensors import State, plain

_KEY = "fedllm"


def pack(head: Mapping[str, Any], tensors: State) -> bytes:
    """The bytes of a safetensors file whose metadata have `head` (JSON) and the digest. Same input, same bytes."""
    ready, text = plain(tensors), json.dumps(head, sort_keys=True)
    return save(ready, metadata={_KEY: json.dumps({"head": text, "sha256": digest(text, ready)})})


def unpack(data: bytes) -> tuple[dict[str, Any], State]:
    """The head and the tensors. Nothing in `data` is executed. Raises UserError unless `pack` made these bytes."""
    try:
        tensors = load(data)
        end = 8 + int.from_bytes(data[:8], "little")
        found = json.loads(json.loads(data[8:end])["__metadata__"][_KEY])
        head = json.loads(found["head"])
        if digest(found["head"], tensors) != found["sha256"]:
            raise ValueError("the contents do not match their digest")
        if not isinstance(head, dict):
            raise ValueError(f"the head is a {type(head).__name__}, not an object")
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        size = f"{len(data):,} bytes" if isinstance(data, bytes) else type(data).__name__
        raise UserError(f"found {size}, expected a complete message or file written by fedllm: {error}") from error
    return head, tensors


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of the tensors' names, dtypes, shapes and bits."""
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write(path: str | Path, data: bytes) -> None:
    """Writes a file completely or not at all, and creates its folder. Raises RunError if it cannot be written."""
    path = Path(path).expanduser()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, data)


def read(path: str | Path) -> tuple[dict[str, Any], State]:
    """The head and the tensors of a file with the bytes of `pack`. Raises UserError if it is missing or damaged."""
    path = Path(path).expanduser()
    try:
        return unpack(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
