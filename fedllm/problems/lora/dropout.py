"""Dropout masks as a pure function of client, step and place, and not of a random stream.

Each bit of a mask is a hash of (seed, round, client, step, layer, use of the layer in the pass, sample slot, token
position, feature). Padding, slices and the clients trained together do not change it. Rates are rounded to 1/65536.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedllm.common.hashing import M1, M2, mix
from fedllm.common.seeding import derive


def row_keys(seed: int, round: int, step: int, clients: Sequence[int], slots: Tensor) -> Tensor:
    """Keys [C * n] (int32) of a micro-batch's samples, client by client. slots [C, n]: places in its batch."""
    keys = [derive(seed, "dropout", round, client, step) & 0x7FFFFFFF for client in clients]
    return mix(torch.tensor(keys, dtype=torch.int32)[:, None] + slots.to(torch.int32) * 0x3504F333).reshape(-1)


class Dropout:
    """The dropout of one pass.

    keys [N]: row_keys of the samples. layers: how many dropout layers there are. sample, position [R, L]: of packed
    rows, which sample each token belongs to and its place there; None where each row is one sample. What the features
    of a token share is hashed for all layers at once, so that each layer launches few operations.
    """

    def __init__(self, keys: Tensor, layers: int, sample: Tensor | None = None, position: Tensor | None = None) -> None:
        self._keys, self._layers, self._sample, self._position = keys, layers, sample, position
        self._hashes: dict[int, Tensor] = {}
        self._pairs: dict[int, Tensor] = {}

    def __call__(self, x: Tensor, rate: float, layer: int, use: int = 0) -> Tensor:
        """x [N, F] or [R, L, F] with each value zeroed at `rate` and the others scaled up.

        layer: its number. use: how often the pass has used that layer before.
        """
        threshold = round(rate * 65536)
        if threshold == 0:
            return x
        h = (self._of_tokens(x.shape[1]) if x.dim() == 3 else self._of_samples)[layer, ..., None]
        if use:
            h = mix(h + (use * 0x5BD1E995 & 0x7FFFFFFF))
        h = h ^ self._of_pairs(x.shape[-1])
        h *= M1
        h ^= (h >> 15).bitwise_and_(0x1FFFF)
        h *= M2
        stays = h.view(torch.int16)[..., : x.shape[-1]] >= threshold - 32768
        return x * (stays * (65536 / (65536 - threshold))).to(x.dtype)

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return len(self._keys if self._sample is None else self._sample)

    @cached_property
    def _of_samples(self) -> Tensor:
        """[layers, N]."""
        layers = torch.arange(self._layers, dtype=torch.int32, device=self._keys.device)
        return mix(self._keys + layers[:, None] * 0x2545F491)

    def _of_tokens(self, length: int) -> Tensor:
        """[layers, R, L] for rows of this length."""
        if length not in self._hashes:
            h, position = self._of_samples[..., None], self._position
            if self._sample is not None:
                h = self._of_samples[:, self._sample]
            if position is None:
                position = torch.arange(length, device=h.device)
            self._hashes[length] = mix(h + position.to(torch.int32) * 0x1B873593)
        return self._hashes[length]

    def _of_pairs(self, features: int) -> Tensor:
        """[(F + 1) / 2]: one hash serves two features, 16 bits each."""
        if features not in self._pairs:
            numbers = torch.arange((features + 1) // 2, dtype=torch.int32, device=self._keys.device)
            self._pairs[features] = mix(numbers)
        return self._pairs[features]
