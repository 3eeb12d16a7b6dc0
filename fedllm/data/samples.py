"""What a problem trains on: samples as a model reads them."""

from __future__ import annotations

from fedllm.data.pixels import Pixels
from fedllm.data.tokenization import Tokens

Samples = Tokens | Pixels
"""n samples with `targets` and `lengths` [n], and `rows(indices)`, the model's inputs."""
