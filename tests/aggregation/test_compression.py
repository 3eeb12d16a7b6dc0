"""Formats of uploads: unbiased, small, independent of what is computed together, and harmless to kept state."""

from __future__ import annotations

import pytest
import torch

from fedllm.aggregation.compression import decode, encode, sent_bytes, uniform

LOW = ("int8", "int4")


def rows(count: int = 3, n: int = 1000) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, n, generator=draw) * torch.tensor([[1e-6], [1.0], [1e3]])[:count]


@pytest.mark.parametrize(("form", "expected"), [("float32", 4000), ("bfloat16", 2000), ("int8", 1016), ("int4", 516)])
def test_bytes_are_those_of_what_travels(form: str, expected: int) -> None:
    value = rows()[:1]
    found = encode(value, form, uniform(0, 0, [0], "d", 1000))
    assert sent_bytes(1000, form) == sum(each.nbytes for each in found.values()) == expected


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1001])
@pytest.mark.parametrize("form", LOW)
def test_a_value_moves_by_less_than_a_step(form: str, n: int) -> None:
    value = rows(3, n)
    back = decode(encode(value, form, uniform(0, 0, [0, 1, 2], "d", n)), form, n, torch.float32)
    largest = {"int8": 127, "int4": 7}[form]
    step = torch.stack([part.abs().amax(1) / largest for part in value.split(256, dim=1)], dim=1)
    assert back.shape == value.shape
    assert bool(((back - value).abs() <= 1.001 * step.repeat_interleave(256, dim=1)[:, :n]).all())


@pytest.mark.parametrize("form", LOW)
def test_rounding_is_unbiased(form: str) -> None:
    value, count = rows(1, 300), 4000
    draws = torch.rand(count, 300, generator=torch.Generator().manual_seed(1))
    back = decode(encode(value.expand(count, -1).contiguous(), form, draws), form, 300, torch.float32).double()
    error = (back.mean(0) - value[0].double()) / (back.std(0) / count**0.5).clamp(min=1e-12)
    inner = back.std(0) > 0
    assert float(inner.double().mean()) > 0.9
    assert float(error[inner].abs().max()) < 5
    assert abs(float(error[inner].mean())) < 0.3


def test_a_row_of_zeros_stays_zero_and_a_bad_row_stays_bad() -> None:
    value = torch.stack([torch.zeros(300), torch.full((300,), float("nan")), torch.full((300,), float("inf"))])
    for form in LOW:
        back = decode(encode(value, form, torch.rand(3, 300)), form, 300, torch.float32)
        assert not bool(back[0].any())
        assert not bool(torch.isfinite(back[1]).all())
        assert not bool(torch.isfinite(back[2]).all())


def test_draws_depend_on_the_client_and_not_on_its_neighbours() -> None:
    together, alone = uniform(3, 5, [7, 2], "d", 40), uniform(3, 5, [2], "d", 40)
    assert torch.equal(together[1], alone[0])
    for other in (uniform(4, 5, [2], "d", 40), uniform(3, 6, [2], "d", 40), uniform(3, 5, [2], "y", 40)):
        assert not torch.equal(other, alone)
