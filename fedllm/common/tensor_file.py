"""Plain numbers and tensors together, as bytes or as a file: safetensors with a JSON head, and a digest of both."""

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
    """One safetensors file, whose metadata hold `head` and the digest. The same input gives the same bytes."""
    ready, text = plain(tensors), json.dumps(head, sort_keys=True)
    return save(ready, metadata={_KEY: json.dumps({"head": text, "sha256": digest(text, ready)})})


def unpack(data: bytes) -> tuple[dict[str, Any], State]:
    """The head and the tensors. Nothing in `data` is executed; UserError unless they are what `pack` made."""
    try:
        tensors = load(data)
        end = 8 + int.from_bytes(data[:8], "little")
        found = json.loads(json.loads(data[8:end])["__metadata__"][_KEY])
        head = json.loads(found["head"])
        if digest(found["head"], tensors) != found["sha256"]:
            raise ValueError("they do not match their digest")
        if not isinstance(head, dict):
            raise ValueError(f"their head is a {type(head).__name__}")
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        size = f"{len(data):,} bytes" if isinstance(data, bytes) else type(data).__name__
        raise UserError(f"found {size}, expected a whole message or file of fedllm: {error}") from error
    return head, tensors


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of the tensors' names, dtypes, shapes and bits."""
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write(path: str | Path, data: bytes) -> None:
    """Writes a file, and the folders above it, whole or not at all. RunError where it cannot be written."""
    path = Path(path).expanduser()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, data)


def read(path: str | Path) -> tuple[dict[str, Any], State]:
    """What lies in a file that `write` made of `pack`'s bytes. UserError, naming it, where it is not whole."""
    path = Path(path).expanduser()
    try:
        return unpack(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
