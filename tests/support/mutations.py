"""Messages changed at random: bytes, the header of the safetensors file, and contents under a digest that is right."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedllm.common import tensor_file

HUGE = 2**40  # values: 4 TiB of float32
BAD_VALUES: list[Any] = [
    -1, 2**54, 2**63, 10**400, 1.5, float("nan"), float("inf"), True, "text", "\x00\ud800", "9", [], [1, [2]],
    {"a": {}}, "x" * 2000, [0] * 200,
]  # fmt: skip
DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I64", "U64", "I8", "BOOL", "C64", "X9"]
SHAPES = [[HUGE], [HUGE, HUGE], [0, HUGE], [2**63], [-1], [1] * 200, [], ["4"], [4.5], None, 4]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The message with one to three changes of one kind."""
    change = draw.choice([_flipped, _cut, _repeated, _random, _claimed, _claimed, _resealed, _resealed, _resealed])
    return change(data, draw)


def _flipped(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _cut(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end + 1 :]


def _repeated(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    place = draw.randrange(len(data) + 1)
    return data[:place] + data[start : end + 1] + data[place:]


def _random(data: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice([0, 1, 7, 8, 9, 100, 5000]))


def _claimed(data: bytes, draw: random.Random) -> bytes:
    """Another header over the same bytes: it claims other shapes, types, places or lengths."""
    header, body = _header(data)
    names = [key for key in header if key != "__metadata__"]
    name, length = draw.choice(names or ["x"]), None
    match draw.randrange(7) if names else draw.randrange(5, 7):
        case 0:
            header[name]["shape"] = draw.choice(SHAPES)
        case 1:
            header[name]["dtype"] = draw.choice(DTYPES)
        case 2:
            header[name]["data_offsets"] = [0, draw.choice([0, 4, HUGE, 2**63, -1])]
        case 3:
            header[name] |= {"shape": [HUGE], "data_offsets": [0, 4 * HUGE]}
        case 4:
            header[str(draw.random())] = draw.choice([header[name], {}, None, 3])
        case 5:
            header["__metadata__"] = draw.choice([None, {}, {"fedllm": "{}"}, {"fedllm": "[" * 30_000}, {"fedllm": 3}])
        case 6:
            length = draw.choice([0, 2**40, 2**64 - 1, len(data), 100_000_001])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _header(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _resealed(data: bytes, draw: random.Random) -> bytes:
    """Another head or other tensors, with the digest that belongs to them, as who knows the format can make it."""
    head, tensors = tensor_file.unpack(data)
    changes: list[Callable[[], None]] = [
        lambda: head.update({draw.choice(list(head)): draw.choice(BAD_VALUES)}),
        lambda: head.pop(draw.choice(list(head))),
        lambda: head.update({"another": draw.choice(BAD_VALUES)}),
        lambda: tensors.update({"another/" * draw.choice([1, 500]): _bad_tensor(draw)}),
    ]
    if tensors:
        changes += [
            lambda: tensors.update({draw.choice(list(tensors)): _bad_tensor(draw)}),
            lambda: tensors.pop(draw.choice(list(tensors))),
        ]
    draw.choice(changes)()
    return tensor_file.pack(head, tensors)


def _bad_tensor(draw: random.Random) -> Tensor:
    dtypes = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    return draw.choice(
        [
            torch.full((1, 4), torch.nan),
            torch.full((1, 4), -torch.inf),
            torch.full((4,), torch.nan),
            torch.zeros(1, 5),
            torch.zeros(()),
            torch.zeros(0),
            torch.zeros(1, 4, 1),
            torch.ones(1, 4).to(draw.choice(dtypes)),
            torch.ones(4).to(draw.choice(dtypes)),
            torch.zeros(40_000),
        ]
    )
