"""Batch norm's statistics, and group norm in its place."""

from __future__ import annotations

import pytest
import torch
from full_models import Pixels, bert, resnet, small_net
from torch import nn

from fedllm.common.errors import UserError
from fedllm.models.norms import apply_norm, batch_norms, statistics


def test_group_norm_takes_the_place_of_every_batch_norm_with_its_scale_and_shift() -> None:
    model = resnet()
    paths = batch_norms(model)
    assert len(paths) == 6
    for path in paths:
        nn.init.normal_(model.get_submodule(path).weight)  # type: ignore[arg-type]
    weights = {path: model.get_submodule(path).weight.clone() for path in paths}  # type: ignore[operator,union-attr]
    apply_norm(model, "group", "tiny")
    assert batch_norms(model) == []
    assert statistics(model).dim == 0
    for path in paths:
        made = model.get_submodule(path)
        assert isinstance(made, nn.GroupNorm)
        assert (made.num_groups, made.num_channels, made.eps) == (2, 8, 1e-5)
        assert torch.equal(made.weight, weights[path])
    alone = model(Pixels.draw(1).values).logits
    assert torch.allclose(model(Pixels.draw(3).values).logits[:1], alone, atol=1e-6)  # no sample looks at another


@pytest.mark.parametrize(("channels", "groups"), [(64, 2), (48, 2), (33, 1), (2, 2)])
def test_the_number_of_groups_divides_the_channels(channels: int, groups: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(channels))
    apply_norm(model, "group", "one")
    assert model[0].num_groups == groups


def test_statistics_are_the_running_means_and_variances() -> None:
    assert statistics(small_net()).names == ("norm.running_mean", "norm.running_var")
    assert statistics(nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))).dim == 0
    assert statistics(bert()).dim == 0


@pytest.mark.parametrize("norm", ["group", "local"])
def test_norm_of_a_model_without_batch_norm_is_refused(norm: str) -> None:
    with pytest.raises(UserError, match=f"model.norm={norm}: model 'tiny' has no batch norm; leave model.norm out"):
        apply_norm(bert(), norm, "tiny")  # type: ignore[arg-type]
    apply_norm(bert(), "average", "tiny")


def test_another_kind_of_batch_norm_does_not_become_group_norm() -> None:
    with pytest.raises(UserError, match="0 of model 'flat' is a BatchNorm1d, expected a BatchNorm2d"):
        apply_norm(nn.Sequential(nn.BatchNorm1d(4)), "group", "flat")
