"""The recipe section `privacy:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import require_positive_settings, setting


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy; null = none. Two of epsilon, delta and noise give the third."""

    level: Literal["client", "sample"] = setting(
        "client",
        "what is protected: client = all that one client sends, from whoever sees the model; sample = each of a "
        "client's training samples",
    )
    noise: float | None = setting(
        None, "standard deviation of the noise over the clip (z); 0 = clipping alone, which protects nobody"
    )
    epsilon: float | None = setting(
        None, "privacy lost in the whole run; with noise and delta a budget: the run ends before the round beyond it"
    )
    delta: float | None = setting(None, "probability with which epsilon may not hold; below 1 / number of clients")
    clip: float | None = setting(
        None, "largest L2 norm of a sample's gradient, for level: sample alone; uploads.clip is for level: client"
    )

    def __post_init__(self) -> None:
        require_positive_settings(self, "epsilon", "delta", "clip")
        if self.noise is not None and self.noise < 0:
            raise UserError(f"noise: found {self.noise}, expected zero or more")
        if self.delta is not None and self.delta >= 1:
            raise UserError(f"delta: found {self.delta}, expected a number below 1")

    @property
    def budget(self) -> float | None:
        """The epsilon that ends the run before it is exceeded; None unless noise, delta and epsilon are all given."""
        return self.epsilon if self.noise is not None and self.delta is not None else None
