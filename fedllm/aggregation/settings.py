"""The recipe sections `uploads:`, `downloads:` and `robust:`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

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
            raise UserError("clip: found no norm, expected one number, one per vector such as {d: 1.0}, or null")

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


@dataclass(frozen=True)
class DownloadsSettings:
    """What the server sends to clients."""

    bits: Literal["float32", "bfloat16"] = setting(
        "float32", "format in which x and the algorithm's vectors travel to clients; clients start from what they read"
    )


EXACT = DownloadsSettings()
"""Downloads as they are."""

Rule = Literal["mean", "median", "trimmed_mean", "nnm_trimmed_mean", "multi_krum"]


@dataclass(frozen=True)
class RobustSettings:
    """How the server reduces a round's uploads where some clients may send anything."""

    rule: Rule = setting(
        "mean",
        "mean = the weighted mean; multi_krum = the mean without the `faulty` clients least like the others; median, "
        "trimmed_mean, nnm_trimmed_mean = by coordinate, the last after each update is mixed with its nearest",
    )
    faulty: int | None = setting(None, "clients of a round that may send anything, with any rule but mean")
    norm: float | None = setting(
        None,
        "reject a client one of whose vectors is longer than this many times the round's median; null = no limit",
    )

    def __post_init__(self) -> None:
        if self.rule == "mean" and self.faulty is not None:
            others = ", ".join(get_args(Rule)[1:])
            raise UserError(
                f"faulty: found {self.faulty} with rule=mean, which withstands none; leave it out, or set rule to one "
                f"of: {others}"
            )
        if self.rule != "mean" and self.faulty is None:
            raise UserError(
                f"faulty: missing, but rule={self.rule} needs it; expected how many bad clients a round may have"
            )
        if self.faulty is not None and self.faulty < 1:
            raise UserError(f"faulty: found {self.faulty}, expected 1 or more; rule=mean withstands none")
        if self.norm is not None and not (self.norm >= 1 and math.isfinite(self.norm)):
            raise UserError(f"norm: found {self.norm}, expected 1 or more: it counts in medians of the round's norms")

    def least(self, faulty: int) -> int:
        """The fewest clients with which the rule withstands so many faulty ones."""
        return 2 * faulty + (3 if self.rule == "multi_krum" else 1)

    def misfit(
        self, algorithm: Algorithm, sampled: int | None, tracked: int | None = None, sampling: str = "fixed"
    ) -> str | None:
        """What does not fit, as the text of an error; None if all fits. sampled: S, None where it is not known yet."""
        if self == MEAN:
            return None
        name, sent = type(algorithm).__name__, " and ".join(algorithm.tracked_uploads())
        if algorithm.weights == "size":
            return (
                "algorithm.weights: found size, but with robust a client's weight must not be its own word; set "
                "algorithm.weights=uniform"
            )
        if sampling == "poisson" and self.rule != "mean":
            return (
                f"federation.sampling: found poisson, but robust.rule={self.rule} needs as many clients in each round"
                "; set federation.sampling=fixed, or robust.rule=mean"
            )
        if sent and self.rule not in ("mean", "multi_krum"):
            return (
                f"robust.rule: found {self.rule}, but {name} tracks {sent}: the server's {sent} would no longer be the "
                "mean of the clients'; set robust.rule=multi_krum, or uploads.clip alone"
            )
        if sent and self.rule == "multi_krum" and tracked is not None and sampled is not None and tracked < sampled:
            return (
                f"federation.tracked_per_round: found {tracked}, but robust.rule=multi_krum compares the {sent} of all "
                f"{sampled} sampled clients; leave it out"
            )
        if self.faulty is not None and sampled is not None and sampled < (least := self.least(self.faulty)):
            return (
                f"federation.clients_per_round: found {sampled}, but robust.rule={self.rule} with "
                f"robust.faulty={self.faulty} needs {least} or more; lower robust.faulty or sample more clients"
            )
        return None


MEAN = RobustSettings()
"""The weighted mean."""
