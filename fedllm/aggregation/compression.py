"""Formats in which vectors travel: bfloat16, and integers of 8 or 4 bits with one scale per 256 values.

An integer is floor(value / scale + u) with u uniform in [0, 1), so that its mean over u is value / scale: rounding is
unbiased. The draws u depend on the run's seed, the round, the client and the vector, not on what is trained together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedllm.aggregation.upload_checks import misfit
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.common.seeding import torch_rng
from fedllm.common.tensors import State

Format = Literal["float32", "bfloat16", "int8", "int4"]
BLOCK = 256  # values that share a scale
LARGEST = {"int8": 127, "int4": 7}
SCALE = ".scale"  # follows a vector's name


def encode(rows: Tensor, form: Format, draws: Tensor | None = None) -> State:
    """What travels for rows [C, n]: {"": codes}, with {".scale": [C, blocks]} in float32 for integers.

    int8: [C, n]. int4: uint8 [C, ceil(n / 2)], the lower four bits first. draws [C, n]: u, for integers.
    """
    if form == "float32":
        return {"": rows}
    if form == "bfloat16":
        return {"": rows.to(torch.bfloat16)}
    assert draws is not None, "integers are rounded at random"
    blocks, n = _blocks(rows.float()), rows.shape[1]
    scale = blocks.abs().amax(dim=2) / LARGEST[form]
    whole = torch.where(scale > 0, scale, 1.0)[:, :, None]
    codes = torch.floor(blocks / whole + _blocks(draws.float())).clamp(-LARGEST[form], LARGEST[form])
    codes = codes.flatten(1)[:, :n].nan_to_num(0.0).to(torch.int8)
    return {"": codes if form == "int8" else _pack(codes), SCALE: scale}


def decode(found: State, form: Format, n: int, dtype: torch.dtype) -> Tensor:
    """The rows [C, n] that `encode` stands for. A scale that is not finite gives values that are not finite."""
    if form in ("float32", "bfloat16"):
        return found[""].to(dtype)
    codes = found[""] if form == "int8" else _unpack(found[""], n)
    return (_blocks(codes.float()) * found[SCALE][:, :, None]).flatten(1)[:, :n].to(dtype)


def sent_bytes(n: int, form: Format, itemsize: int = 4) -> int:
    """Bytes that a vector of n values takes. itemsize: of a value that is not compressed."""
    scales = 4 * -(-n // BLOCK)
    return {"float32": itemsize * n, "bfloat16": 2 * n, "int8": n + scales, "int4": -(-n // 2) + scales}[form]


def format_of(name: str, form: Format, declared: Declared) -> Format:
    """The format in which the vector `name` travels.

    Changes of x and of tracked vectors have both signs and take any format. Second moments and block means span
    decades: they are never below bfloat16. A single number is not compressed, and neither are buffers, which no
    algorithm declares.
    """
    if form == "float32" or name not in declared.of_algorithm or declared.sent[name] == 1:
        return "float32"
    return form if name in declared.changes else "bfloat16"


def to_wire(uploads: Uploads, names: Iterable[str]) -> State:
    """The tensors that travel for the vectors `names`: codes under the vector's own name, scales beside them."""
    found: State = {}
    for name in names:
        parts = uploads.encoded.get(name, {"": uploads.sent[name]})
        found |= {name + suffix: value for suffix, value in parts.items()}
    return found


def from_wire(found: State, form: Format, declared: Declared) -> State | str:
    """The vectors {name: [1, n]} of `declared.sent`, as one client sent them; or what is wrong with the tensors."""
    forms = {name: format_of(name, form, declared) for name in declared.sent}
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, n in declared.sent.items():
        shapes = _wire_shapes(n, forms[name], declared.dtype)
        expected |= {name + suffix: shape for suffix, shape in shapes.items()}
    if not isinstance(found, Mapping) or found.keys() != expected.keys():
        return misfit(found, {name: shape for name, (shape, _) in expected.items()}, declared.dtype) or ""
    for name, (shape, dtype) in expected.items():
        if why := misfit({name: found[name]}, {name: shape}, dtype):
            return why
    vectors: State = {}
    for name, n in declared.sent.items():
        parts = {suffix: found[name + suffix] for suffix in ("", SCALE) if name + suffix in expected}
        vectors[name] = decode(parts, forms[name], n, declared.dtype)
    return vectors


def _wire_shapes(n: int, form: Format, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of one client's vector of n values, by suffix."""
    scale = {SCALE: ((1, -(-n // BLOCK)), torch.float32)}
    if form == "int8":
        return {"": ((1, n), torch.int8), **scale}
    if form == "int4":
        return {"": ((1, -(-n // 2)), torch.uint8), **scale}
    return {"": ((1, n), torch.bfloat16 if form == "bfloat16" else dtype)}


@dataclass(frozen=True)
class Rounding:
    """Replaces each vector by what the receiver will decode. seed: run.seed."""

    form: Format
    seed: int

    def send(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        for name, value in uploads.sent.items():
            form = format_of(name, self.form, declared)
            if form != "float32":
                found = uploads.encoded[name] = self._encode(name, value, form, uploads)
                uploads.sent[name] = decode(found, form, value.shape[1], value.dtype)

    def receive(self, uploads: Uploads, declared: Declared, rows: int) -> None:
        """The message was decoded where it was read."""

    def _encode(self, name: str, value: Tensor, form: Format, uploads: Uploads) -> State:
        draws = None
        if form in LARGEST:
            draws = uniform(self.seed, uploads.round, uploads.clients, name, value.shape[1]).to(value.device)
        return encode(value, form, draws)


def uniform(seed: int, round: int, clients: Sequence[int], name: str, n: int) -> Tensor:
    """Draws [C, n] in [0, 1)."""
    rows = [
        torch.rand(n, generator=torch_rng(seed, f"rounding {name}", round, client), dtype=torch.float32)
        for client in clients
    ]
    return torch.stack(rows)


def _blocks(rows: Tensor) -> Tensor:
    """[C, n] -> [C, blocks, BLOCK], filled with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % BLOCK)).view(len(rows), -1, BLOCK)


def _pack(codes: Tensor) -> Tensor:
    halves = F.pad(codes, (0, codes.shape[1] % 2)).to(torch.uint8).bitwise_and(15)
    return halves[:, 0::2].bitwise_or(halves[:, 1::2].bitwise_left_shift(4))


def _unpack(packed: Tensor, n: int) -> Tensor:
    nibbles = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :n].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
