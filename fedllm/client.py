"""Public names for a federation's clients, for use in any training loop; usage is in `fedllm.deployment.client`."""

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

__all__ = [
    "Broadcast",
    "Client",
    "FederatedOptimizer",
    "ParameterSpace",
    "Upload",
    "full_gradient",
    "model_blocks",
    "model_info",
]
