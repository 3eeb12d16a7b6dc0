"""The recipe section `loss:`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest, setting


@dataclass(frozen=True)
class LossSettings:
    """The loss of local steps, of a classification. Evaluations have the plain cross-entropy."""

    class_weights: Literal["balanced"] | dict[str, float] | None = setting(
        None,
        "factor of a sample's loss by its class: a number for each class's name, such as {'0': 1, '1': 5}, or balanced "
        "= n / (C n_c), where n_c of n training samples are of class c; null = 1",
    )
    label_smoothing: float = setting(0.0, "share of a target that is spread evenly over all classes, 0 to below 1")
    focal: float = setting(0.0, "exponent gamma of the focal loss (1 - p)^gamma (-log p) (Lin et al. 2017); 0 = none")

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing: found {self.label_smoothing}, expected 0 to below 1")
        if not (self.focal >= 0 and math.isfinite(self.focal)):
            raise UserError(f"focal: found {self.focal}, expected 0 or more")
        if self.focal and self.label_smoothing:
            raise UserError(
                f"focal: found {self.focal} with label_smoothing={self.label_smoothing}, expected one of them"
            )
        for name, weight in self.class_weights.items() if isinstance(self.class_weights, dict) else ():
            if not (weight > 0 and math.isfinite(weight)):
                raise UserError(f"class_weights: found {weight} for '{name}', expected a number above 0")

    def weights(self, classes: Sequence[str], counts: Sequence[int] | None) -> tuple[float, ...] | None:
        """The weight of each class, in the order of `classes`; None where all are 1.

        counts: training samples of each class; None where they are not known here, as at the server of real sites.
        Raises UserError for names that are not the classes', and where `balanced` cannot be computed.
        """
        if self.class_weights is None:
            return None
        if isinstance(self.class_weights, dict):
            return _by_name(self.class_weights, classes)
        if counts is None:
            raise UserError(
                "loss.class_weights: found balanced, but the training samples are at the sites; give a number for each "
                "class's name"
            )
        if missing := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
            raise UserError(
                f"loss.class_weights: found balanced, but the class '{missing[0]}' has no training sample; give a "
                "number for each class's name"
            )
        return tuple(sum(counts) / (len(counts) * count) for count in counts)


def _by_name(given: Mapping[str, float], classes: Sequence[str]) -> tuple[float, ...]:
    for name in given:
        if name not in classes:
            raise UserError(
                f"loss.class_weights: found the class '{name}'{nearest(name, list(classes))}, expected "
                f"{', '.join(classes)}"
            )
    if missing := [name for name in classes if name not in given]:
        raise UserError(f"loss.class_weights: found no weight for the class '{missing[0]}'; give one for each class")
    return tuple(float(given[name]) for name in classes)


PLAIN = LossSettings()
"""The cross-entropy as it is."""
