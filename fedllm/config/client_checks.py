"""Checks of the settings by which each client is evaluated."""

from __future__ import annotations

from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.common.errors import UserError
from fedllm.config.settings import EvalSettings, LocalSettings


def check_own_evaluation(evaluated: EvalSettings, local: LocalSettings, privacy: PrivacySettings | None) -> None:
    """Raises UserError, naming the key, for settings of the clients' own evaluation that do not go together."""
    if local.finetune_steps is not None and evaluated.per_client is None:
        raise UserError(
            f"local.finetune_steps: found {local.finetune_steps} without eval.per_client, expected the fraction of its "
            "samples on which a client is evaluated, for example eval.per_client=0.2"
        )
    if privacy is not None and evaluated.per_client is not None:
        raise UserError(
            f"privacy: found with eval.per_client={evaluated.per_client:g}, expected one of the two: the scores of a "
            "client on its own samples get no noise, so epsilon does not cover them"
        )
