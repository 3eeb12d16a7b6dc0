"""What client-level privacy needs of an algorithm and of the steps on its uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedllm.aggregation.settings import UploadsSettings
from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from fedllm.algorithms.base import Algorithm


def require_bounded(algorithm: Algorithm, uploads: UploadsSettings) -> dict[str, float]:
    """The largest norm of each vector that `algorithm` sends. Raises UserError where a client's part in what the server
    releases is not bounded by them."""
    require_no_loss(algorithm)
    sent = [*algorithm.uploads(), *algorithm.tracked_uploads()]
    norms = uploads.norms(algorithm)
    if missing := [name for name in sent if name not in norms]:
        example = ", ".join(f"{name}: 1.0" for name in sent)
        raise UserError(
            f"privacy: {type(algorithm).__name__} sends {' and '.join(sent)}, and uploads.clip has no norm for "
            f"{' and '.join(missing)}; give one for each, such as uploads.clip={{{example}}}"
        )
    if algorithm.weights != "uniform":
        raise UserError(
            f"privacy: found algorithm.weights={algorithm.weights}, expected uniform: the weights tell how many "
            "samples clients have, and change what one client adds; set algorithm.weights=uniform"
        )
    if algorithm.needs_full_gradient():
        raise UserError(
            "privacy: found algorithm.tracking_init=gradient, expected zero: the mean of full gradients before round 1 "
            "would be released without noise"
        )
    return norms


def require_no_loss(algorithm: Algorithm) -> None:
    """Raises UserError for an algorithm whose clients send what they make of their loss."""
    if algorithm.start_loss is not None:
        raise UserError(
            f"privacy: found {type(algorithm).__name__}, whose clients send numbers made of their loss, and whose "
            "server divides by one of them; choose another algorithm, or leave privacy out"
        )


def require_sample_gradients(algorithm: Algorithm) -> None:
    """Raises UserError for an algorithm whose clients need more of a sample than the gradient of its loss."""
    if algorithm.contrastive:
        raise UserError(
            f"privacy: found {type(algorithm).__name__} with level=sample: its clients add a contrast to the loss of "
            "each sample, which is not offered for gradients of single samples; choose another algorithm, or "
            "level=client"
        )
