"""The losses of local steps against PyTorch's own, the paper's formula and scikit-learn's balanced weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.utils.class_weight import compute_class_weight

from fedllm import load_recipe, run_recipe
from fedllm.cli import main
from fedllm.common.errors import UserError
from fedllm.tasks.class_loss import ClassLoss
from fedllm.tasks.loss_settings import LossSettings

LOGITS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))


def test_the_default_is_pytorchs_cross_entropy_bit_for_bit() -> None:
    assert torch.equal(ClassLoss()(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS, reduction="none"))


def test_weights_multiply_the_losses_of_their_classes() -> None:
    weights = (0.5, 2.0, 1.25)
    expected = F.cross_entropy(LOGITS, LABELS, reduction="none", weight=torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(ClassLoss(weights)(LOGITS, LABELS), expected)


def test_smoothing_is_the_cross_entropy_with_a_mixed_target() -> None:
    target = 0.8 * F.one_hot(LABELS, 3) + 0.2 / 3
    expected = -(target * F.log_softmax(LOGITS, dim=1)).sum(dim=1)
    torch.testing.assert_close(ClassLoss(label_smoothing=0.2)(LOGITS, LABELS), expected)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_and_its_gradient_are_the_papers(gamma: float) -> None:
    """Lin et al. 2017, eq. 4."""
    given, own = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    p = torch.softmax(own, dim=1)[torch.arange(40), LABELS]
    expected = -((1 - p) ** gamma) * p.log()
    found = ClassLoss(focal=gamma)(given, LABELS)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(given.grad, own.grad)


def test_focal_loss_of_a_sample_that_is_surely_right_has_a_finite_gradient() -> None:
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    ClassLoss(focal=0.5)(logits, torch.tensor([0, 0])).sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_balanced_weights_are_scikit_learns() -> None:
    labels = np.repeat([0, 1, 2], [5, 20, 75])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    found = LossSettings(class_weights="balanced").weights(("a", "b", "c"), [5, 20, 75])
    assert found is not None
    np.testing.assert_allclose(found, expected)


def test_weights_are_given_by_name() -> None:
    settings = LossSettings(class_weights={"b": 2.0, "a": 1.0})
    assert settings.weights(("a", "b"), None) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.label_smoothing=1"], "loss.label_smoothing: found 1.0, expected 0 to below 1"),
        (["loss.focal=-1"], "loss.focal: found -1.0, expected 0 or more"),
        (["loss.focal=2", "loss.label_smoothing=0.1"], "loss.focal: found 2.0 with label_smoothing=0.1"),
        (["loss.class_weights={'0': 1, '1': 0}"], "loss.class_weights: found 0.0 for '1', expected a number above 0"),
        (["loss.class_weights=even"], "loss.class_weights: found 'even', expected"),
    ],
)
def test_mistakes_are_told_before_anything_loads(overrides: list[str], said: str, tiny: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(tiny / "recipe.yaml", overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"yes": 1.0, "no": 1.0, "maybe": 1.0}, "found the class 'maybe', expected no, yes"),
        ({"yes": 1.0}, "found no weight for the class 'no'"),
        ("balanced", "found balanced, but the training samples are at the sites"),
    ],
)
def test_weights_that_do_not_fit_the_classes(given: dict[str, float] | str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        LossSettings(class_weights=given).weights(("no", "yes"), None)  # type: ignore[arg-type]


def test_balanced_weights_need_a_sample_of_each_class() -> None:
    with pytest.raises(UserError, match="the class 'b' has no training sample"):
        LossSettings(class_weights="balanced").weights(("a", "b"), [3, 0])


@pytest.mark.slow
def test_a_run_trains_with_its_loss(tiny: Path, tmp_path: Path) -> None:
    """120 samples are balanced, so balanced weights are 1 and change nothing; uneven ones change what is learned."""
    short = ["federation.rounds=2", "algorithm=fedavg", "algorithm.lr=0.05"]
    losses = {
        name: run_recipe(tiny / "recipe.yaml", [*short, *words], tmp_path / name).metrics
        for name, words in {
            "plain": [],
            "balanced": ["loss.class_weights=balanced"],
            "uneven": ["loss.class_weights={'0': 0.2, '1': 5}"],
        }.items()
    }
    values = {name: [line["eval_loss"] for line in lines] for name, lines in losses.items()}
    assert values["balanced"] == values["plain"]
    assert values["uneven"] != values["plain"]
    assert losses["uneven"][0]["train_loss"] > 1.5 * losses["plain"][0]["train_loss"]


def test_a_regression_has_no_such_loss(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.regression=true", "loss.focal=2", "partition={scheme: iid, alpha: null}"]
    assert main(["run", str(tiny / "recipe.yaml"), "--dry-run", *words]) == 2
    assert "loss: train is a regression, whose loss has no settings" in capsys.readouterr().err
