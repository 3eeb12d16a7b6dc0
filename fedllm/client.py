"""Public names for a federation's clients, for use in any training loop; usage is in `fedllm.deployment.client`."""

from typing import TYPE_CHECKING, Any

from fedllm.deployment.client import (
    Broadcast,
    Client,
    FederatedOptimizer,
    Upload,
    full_gradient,
    model_blocks,
    model_info,
)
from fedllm.models.flat_parameters import ParameterSpace

if TYPE_CHECKING:
    from fedllm.deployment.trainer import FederatedTrainer

__all__ = [
    "Broadcast",
    "Client",
    "FederatedOptimizer",
    "FederatedTrainer",
    "ParameterSpace",
    "Upload",
    "full_gradient",
    "model_blocks",
    "model_info",
]


def __getattr__(name: str) -> Any:
    """FederatedTrainer is imported when first used: it alone needs transformers' Trainer."""
    if name != "FederatedTrainer":
        raise AttributeError(f"module 'fedllm.client' has no attribute '{name}'")
    from fedllm.deployment.trainer import FederatedTrainer

    return FederatedTrainer
