"""Which settings go together with the section `privacy:`, and with Poisson sampling."""

from __future__ import annotations

from fedllm.aggregation.privacy_checks import require_bounded, require_no_loss, require_sample_gradients
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.algorithms.base import Algorithm
from fedllm.common.errors import UserError
from fedllm.config.settings import FederationSettings, LocalSettings


def check_sampling(federation: FederationSettings) -> None:
    """Raises UserError for what does not fit federation.sampling=poisson."""
    if federation.sampling == "poisson" and federation.min_clients > 1:
        raise UserError(
            f"federation.min_clients: found {federation.min_clients}, expected 1 with federation.sampling=poisson, "
            "where the number of clients differs from round to round and may be 0"
        )


def check_privacy(
    privacy: PrivacySettings | None,
    federation: FederationSettings,
    local: LocalSettings,
    uploads: UploadsSettings,
    algorithm: Algorithm,
) -> None:
    """Raises UserError, naming the key, for settings with which the guarantee of `privacy` would not hold."""
    if privacy is None:
        return
    _check_numbers(privacy)
    if privacy.level == "client":
        _check_client_level(privacy, federation, local, uploads, algorithm)
    else:
        _check_sample_level(privacy, local, algorithm)


def _check_sample_level(privacy: PrivacySettings, local: LocalSettings, algorithm: Algorithm) -> None:
    if privacy.clip is None:
        raise UserError(
            "privacy.clip: missing; level=sample needs the largest norm of a sample's gradient, such as "
            "privacy.clip=0.5 (uploads.clip is for level=client)"
        )
    require_no_loss(algorithm)
    require_sample_gradients(algorithm)
    if local.steps is None:
        raise UserError(
            f"privacy: found local.epochs={local.epochs or 1}, expected local.steps with level=sample: in each step "
            "each sample is taken by itself, so there are no epochs; give local.steps"
        )
    if algorithm.weights != "uniform":
        raise UserError(
            f"privacy: found algorithm.weights={algorithm.weights}, expected uniform with level=sample: the weight "
            "tells a client's number of samples, which changes with one sample; set algorithm.weights=uniform"
        )
    if algorithm.needs_full_gradient():
        raise UserError(
            "privacy: found algorithm.tracking_init=gradient, expected zero with level=sample: full gradients before "
            "round 1 get no noise; set algorithm.tracking_init=zero"
        )


def _check_numbers(privacy: PrivacySettings) -> None:
    given = [name for name in ("epsilon", "delta", "noise") if getattr(privacy, name) is not None]
    if len(given) < 2:
        found = f"{given[0]} alone" if given else "none of them"
        raise UserError(
            f"privacy: found {found}, expected two of epsilon, delta and noise, such as {{epsilon: 8, delta: 1.0e-4}} "
            "or {noise: 1.0, delta: 1.0e-4}; privacy=null asks for none"
        )
    if privacy.noise == 0 and privacy.epsilon is not None:
        raise UserError(
            f"privacy.noise: found 0 with epsilon={privacy.epsilon:g}, but without noise epsilon is infinite; leave "
            "epsilon out to train with clipping alone"
        )


def _check_client_level(
    privacy: PrivacySettings,
    federation: FederationSettings,
    local: LocalSettings,
    uploads: UploadsSettings,
    algorithm: Algorithm,
) -> None:
    if privacy.clip is not None:
        raise UserError(
            f"privacy.clip: found {privacy.clip:g} with level=client, expected none: it is the norm of a sample's "
            "gradient, for level=sample; what a client sends is clipped to uploads.clip"
        )
    require_bounded(algorithm, uploads)
    if local.steps is None:
        raise UserError(
            f"privacy: found local.epochs={local.epochs or 1}, expected local.steps: the server's formulas use K, "
            "which with epochs tells how many samples clients have"
        )
    sampled, tracked = federation.clients_per_round, federation.tracked_per_round
    if tracked is not None and tracked != sampled:
        raise UserError(
            f"privacy: found federation.tracked_per_round={tracked}, expected none, so that all of clients_per_round="
            f"{sampled} send their tracked vectors: noise and epsilon are for one sampling rate"
        )
    if federation.min_clients > 1:
        raise UserError(
            f"privacy: found federation.min_clients={federation.min_clients}, expected 1: a run that stops for too few "
            "uploads tells who took part"
        )
