"""The loss of a classification in local steps: cross-entropy, with class weights, label smoothing or focal loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy of each sample, with the settings' changes. weights: of the C classes; None where all are 1."""

    weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    focal: float = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The losses [n] of logits [n, C] for the ids [n]."""
        losses = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=self.label_smoothing)
        if self.focal:
            wrong = -torch.expm1(-losses)  # 1 - p, where p = exp(-loss)
            # Its power has no finite derivative at 0, where the loss is 0.
            losses = wrong.clamp_min(torch.finfo(losses.dtype).tiny) ** self.focal * losses
        if self.weights is None:
            return losses
        return losses * torch.tensor(self.weights, dtype=losses.dtype, device=losses.device)[targets]
