"""The recipe section `uploads:`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import setting

if TYPE_CHECKING:
    from fedllm.algorithms.base import Algorithm


@dataclass(frozen=True)
class UploadsSettings:
    """What happens to the vectors that a client sends, before they travel. A client keeps what it sent."""

    clip: float | dict[str, float] | None = setting(
        None,
        "largest L2 norm of each vector that a client sends, on the client and again on the server: one number for all "
        "vectors, or one per name such as {d: 1.0, y: 0.1}; null = no limit. algorithm.clip_norm clips gradients",
    )
    bits: Literal["float32", "bfloat16", "int8", "int4"] = setting(
        "float32",
        "format of the numbers that travel; int8 and int4 are rounded at random without bias, and second moments then "
        "travel as bfloat16",
    )

    def __post_init__(self) -> None:
        given = self.clip if isinstance(self.clip, dict) else {"": self.clip}
        for name, norm in given.items():
            if norm is not None and not (norm > 0 and math.isfinite(norm)):
                raise UserError(f"clip: found {norm}{f' for {name}' if name else ''}, expected a number above 0")
        if isinstance(self.clip, dict) and not self.clip:
            raise UserError("clip: found no vector's name, expected such as {d: 1.0}, one number, or null")

    def norms(self, algorithm: Algorithm) -> dict[str, float]:
        """The largest norm of each vector that `algorithm` sends, where there is one. Raises UserError for a name that
        it does not send."""
        names = [*algorithm.uploads(), *algorithm.tracked_uploads()]
        if not isinstance(self.clip, dict):
            return {} if self.clip is None else dict.fromkeys(names, self.clip)
        for name in self.clip:
            if name not in names:
                raise UserError(
                    f"uploads.clip: found a norm for '{name}', expected one for {' and '.join(names)}, which "
                    f"{type(algorithm).__name__} sends"
                )
        return dict(self.clip)


PLAIN = UploadsSettings()
"""Uploads as they are."""
