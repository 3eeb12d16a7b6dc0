"""The tokens of a pass that a causal language model learns to predict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedllm.data.pixels import Pixels
from fedllm.data.samples import Samples
from fedllm.data.tokenization import send


@dataclass(frozen=True)
class LearnedTokens:
    """T learned tokens of N samples in R rows of L tokens, in the order of the samples.

    places [T]: of the tokens before them, whose hidden states predict them, among the R * L. targets [T]: their ids.
    samples [T]: which of the N samples each belongs to.
    """

    places: Tensor
    targets: Tensor
    samples: Tensor
    count: int

    @classmethod
    def within(cls, tokens: Samples, samples: np.ndarray, begin: np.ndarray) -> LearnedTokens | None:
        """Those of the samples [N] (-1: none) that begin at the places [N]; None for tokens that nothing learns."""
        if isinstance(tokens, Pixels) or tokens.learned is None:
            return None
        offsets = tokens.offsets.numpy()
        lengths = np.where(samples >= 0, offsets[samples + 1] - offsets[samples], 0)
        owner = np.repeat(np.arange(len(samples)), lengths)
        position = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = torch.from_numpy(offsets[samples[owner]] + position)
        learned = tokens.learned[source]
        places = torch.from_numpy(begin[owner] + position - 1)[learned]
        return cls(places, tokens.input_ids[source[learned]].long(), torch.from_numpy(owner)[learned], len(samples))

    def to(self, device: torch.device) -> LearnedTokens:
        """The same tokens on `device`."""
        places, targets, samples = (send(value, device) for value in (self.places, self.targets, self.samples))
        return LearnedTokens(places, targets, samples, self.count)
