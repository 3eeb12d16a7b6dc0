"""Dropout masks are a function of who and where."""

from __future__ import annotations

import torch
from transformers import AlbertConfig, AlbertForSequenceClassification

from fedllm.models.flat_parameters import ParameterSpace
from fedllm.problems.lora.dropout import Dropout, row_keys
from fedllm.problems.lora.stacked_model import StackedModel


def keys(clients: list[int], slots: list[list[int]], step: int = 0) -> torch.Tensor:
    return row_keys(7, 1, step, clients, torch.tensor(slots))


def dropout(x: torch.Tensor, rate: float, layer: int, keys: torch.Tensor) -> torch.Tensor:
    return Dropout(keys, layers=6)(x, rate, layer)


def test_a_rows_mask_does_not_depend_on_the_rows_around_it() -> None:
    x = torch.ones(4, 6, 10)
    both = dropout(x, 0.3, 5, keys([3, 8], [[0, 1], [0, 1]]))
    alone = dropout(x[:1], 0.3, 5, keys([8], [[1]]))
    assert torch.equal(both[3:], alone)


def test_padding_does_not_change_the_mask() -> None:
    k = keys([3], [[0, 1]])
    assert torch.equal(dropout(torch.ones(2, 9, 7), 0.5, 0, k)[:, :4], dropout(torch.ones(2, 4, 7), 0.5, 0, k))


def test_packed_rows_have_the_masks_of_padded_ones() -> None:
    """Samples of three, two and four tokens in rows of five, one place empty, and as vectors, which have no place."""
    k = keys([3], [[0, 1, 2]])
    sample = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]])
    position = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])
    packed = Dropout(k, 6, sample, position)
    padded = dropout(torch.ones(3, 4, 7), 0.5, 4, k)
    real = sample >= 0
    assert torch.equal(packed(torch.ones(2, 5, 7), 0.5, 4)[real], padded[sample[real], position[real]])
    assert torch.equal(packed(torch.ones(3, 7), 0.5, 4), dropout(torch.ones(3, 7), 0.5, 4, k))


def test_rate_and_scale() -> None:
    x = torch.ones(64, 32, 96)
    dropped = dropout(x, 0.1, 2, keys(list(range(8)), [list(range(8))] * 8))
    share = float((dropped == 0).float().mean())
    assert abs(share - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.9), rtol=2e-5, atol=0)


def test_every_coordinate_of_the_counter_matters_and_masks_are_uncorrelated() -> None:
    x = torch.ones(32, 16, 64)
    slots = [list(range(32))]
    base = keys([1], slots)
    masks = {
        "base": dropout(x, 0.5, 0, base),
        "layer": dropout(x, 0.5, 1, base),
        "once more": Dropout(base, layers=6)(x, 0.5, 0, 1),
        "step": dropout(x, 0.5, 0, keys([1], slots, step=1)),
        "client": dropout(x, 0.5, 0, keys([2], slots)),
        "round": dropout(x, 0.5, 0, row_keys(7, 2, 0, [1], torch.tensor(slots))),
        "seed": dropout(x, 0.5, 0, row_keys(8, 1, 0, [1], torch.tensor(slots))),
    }
    bound = 5 / x.numel() ** 0.5
    for name, mask in masks.items():
        if name != "base":
            assert abs(float(((masks["base"] - 1) * (mask - 1)).mean())) < bound, name
    m = masks["base"] - 1
    for dim in range(3):
        shifted = m.roll(1, dims=dim)
        assert abs(float((m * shifted).mean())) < bound


def test_a_layer_that_a_model_goes_through_again_has_another_mask() -> None:
    """ALBERT's depths are one layer."""
    sizes = {"hidden_size": 64, "embedding_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    model = AlbertForSequenceClassification(AlbertConfig(**sizes, num_hidden_layers=3, hidden_dropout_prob=0.5))
    model.albert.requires_grad_(False)
    kept: list[torch.Tensor] = []
    (layer,) = (module for name, module in model.named_modules() if name.endswith("output_dropout"))
    layer.register_forward_hook(lambda module, given, found: kept.append(found != 0))
    space = ParameterSpace.of(model)
    stacked, X = StackedModel(model, space), space.gather(model)[None]
    for _ in range(2):
        stacked(X, {"input_ids": torch.full((4, 8), 5)}, keys([3], [[0, 1, 2, 3]]))
    assert len(kept) == 6
    assert all(torch.equal(first, again) for first, again in zip(kept[:3], kept[3:], strict=True))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < float((kept[one] == kept[other]).float().mean()) < 0.6


def test_rate_zero_is_the_identity() -> None:
    x = torch.randn(2, 3)
    assert dropout(x, 0.0, 0, keys([0], [[0, 1]])) is x
