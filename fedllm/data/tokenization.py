"""Token ids of a split, stored flat; padding is added per batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from fedllm.data.loading import Split

BATCH = 1000  # rows per tokenizer call


@dataclass(frozen=True)
class Tokens:
    """n examples without padding: example i is input_ids[offsets[i]:offsets[i + 1]].

    input_ids: int32 [total]. token_type_ids: uint8 [total], or None if the tokenizer gives none or all are zero.
    offsets: int64 [n + 1]. targets: int64 class ids or float32 values [n], the task's target of each example.
    learned: bool [total], the tokens that are to be predicted from those before them, never an example's first one, and
    at least one of each example; None where an example's target is not its tokens. notes: messages to the user.
    An example that was left out has no token until `take` removes it.
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor | None
    offsets: torch.Tensor
    targets: torch.Tensor
    learned: torch.Tensor | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens of each example, int64 [n]."""
        return self.offsets.diff()

    @cached_property
    def sizes(self) -> torch.Tensor:
        """How many targets the loss of each example is the sum of, int64 [n]: its learned tokens, or 1."""
        if self.learned is None:
            return torch.ones(len(self), dtype=torch.long)
        sums = torch.cat([torch.zeros(1, dtype=torch.long), self.learned.cumsum(0)])
        return sums[self.offsets].diff()

    def take(self, rows: torch.Tensor) -> Tokens:
        """The examples at `rows`, int64, in that order."""
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        places = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
        return replace(
            self,
            input_ids=self.input_ids[places],
            token_type_ids=None if self.token_type_ids is None else self.token_type_ids[places],
            offsets=offsets,
            targets=self.targets[rows],
            learned=None if self.learned is None else self.learned[places],
        )

    def to(self, device: torch.device | str) -> Tokens:
        """The same tokens on `device`."""
        types = None if self.token_type_ids is None else self.token_type_ids.to(device)
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            token_type_ids=types,
            offsets=self.offsets.to(device),
            targets=self.targets.to(device),
            learned=None if self.learned is None else self.learned.to(device),
        )

    def rows(self, indices: torch.Tensor, length: int | None = None, pad_id: int = 0) -> dict[str, torch.Tensor]:
        """The examples `indices` [b] as a batch, padded on the right to `length` (default: the longest example).

        Returns input_ids, attention_mask and, if the tokenizer gives them, token_type_ids, each int64 [b, length].
        Longer examples are cut to `length`. A given `length` avoids one synchronisation with the GPU.
        """
        start, end = self.offsets[indices], self.offsets[indices + 1]
        if length is None:
            length = int((end - start).max()) if len(indices) else 0
        place = start[:, None] + torch.arange(length, device=start.device)  # [b, length]
        real = place < end[:, None]
        place = place.where(real, 0)
        batch = {
            "input_ids": self.input_ids[place].long().where(real, pad_id),
            "attention_mask": real.long(),
        }
        if self.token_type_ids is not None:
            batch["token_type_ids"] = self.token_type_ids[place].long().where(real, 0)
        return batch


def send(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to `device`; to a GPU from pinned memory, so that the host does not wait for the copy."""
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def tokenize(split: Split, tokenizer: Any, max_length: int, progress: ProgressCallback | None = None) -> Tokens:
    """Tokenizes a split once and cuts each example to `max_length` tokens; in a pair, the longer text is cut first.

    If a tokenizer puts no token between the texts of a pair (GPT-2, SmolLM2), its sep token is put there, or else its
    eos token: [a, eos, b]. An example without tokens (the empty text with GPT-2) becomes one eos token, or else one pad
    token. Raises UserError if max_length is below 4 or no token can separate a pair.
    """
    if max_length < 4:
        raise UserError(f"data.max_length={max_length}: expected at least 4 tokens, room for a pair and its separators")
    separator = pair_separator(tokenizer) if len(split.texts) == 2 else ""
    filler = next((i for i in (tokenizer.eos_token_id, tokenizer.pad_token_id) if i is not None), 0)
    ids, types = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
    lengths: list[int] = []
    for start in range(0, len(split), BATCH):
        columns = [texts[start : start + BATCH] for texts in split.texts]
        if separator:
            columns[1] = [separator + text for text in columns[1]]
        encoded = tokenizer(*columns, truncation="longest_first", max_length=max_length, return_attention_mask=False)
        rows = [row or [filler] for row in encoded["input_ids"]]
        ids.append(np.fromiter(chain.from_iterable(rows), np.int32))
        lengths.extend(map(len, rows))
        if "token_type_ids" in encoded:
            types.append(np.fromiter(chain.from_iterable(row or [0] for row in encoded["token_type_ids"]), np.uint8))
        if progress:
            progress("tokenizing", min(start + BATCH, len(split)), len(split))
    flat_types = np.concatenate(types)
    return Tokens(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        token_type_ids=torch.from_numpy(flat_types) if flat_types.any() else None,
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        targets=torch.from_numpy(split.labels.copy()),
    )


def pair_separator(tokenizer: Any) -> str:
    """The token to put between two texts; "" for a tokenizer that adds one itself."""
    if tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False):
        return ""
    token = tokenizer.sep_token or tokenizer.eos_token
    if not token:
        raise UserError("the tokenizer neither separates a pair of texts nor has a sep or eos token; set its eos_token")
    return str(token)
