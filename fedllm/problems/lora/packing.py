"""Samples laid end to end in rows of one length, so that little of a pass is padding.

A token attends to those of its own sample only, and positions start anew with every sample. A model that takes position
ids and an attention mask of four dimensions then computes what it computes for rows of one sample. `find_format` checks
that on samples of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from fedllm.data.tokenization import Tokens, send
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.sample_attention import SampleGroups

# The length of a row at which its attention costs as much as its matrix products: per token and layer, 4 h L operations
# against 24 h^2, for h = 700.
_ATTENTION = 4096
_CANDIDATES = 8


@dataclass(frozen=True)
class PackedFormat:
    """How a model reads packed rows.

    causal: a token attends to earlier ones only, and the head reads a sample's last token that is not the pad token
    (see models.load_backbone), not its first. first_position: the position id of a sample's first token.
    """

    causal: bool
    first_position: int


@dataclass(frozen=True)
class Packed:
    """N = C * m samples of C clients in R rows of L tokens; each row holds samples of one client, whose rows are
    neighbours.

    inputs: input_ids, position_ids and, where the tokens have any, token_type_ids [R, L].
    sample, position [R, L]: which of the N samples a token belongs to, -1 for padding, and its place there.
    reads [N]: place of the token that the head reads, among the R * L; of a missing sample any place of its client.
    sizes [C]: tokens of each client's rows. causal: a token attends to earlier ones only. learned: the tokens to
    predict, None where the head reads one token of each sample. groups: of all samples in one row without padding,
    where the clients share the row, one after the other; None elsewhere.
    """

    inputs: dict[str, Tensor]
    sample: Tensor
    position: Tensor
    reads: Tensor
    sizes: list[int]
    causal: bool
    learned: LearnedTokens | None = None
    groups: SampleGroups | None = None

    def mask(self, dtype: torch.dtype) -> Tensor:
        """What is added to the attention scores [R, 1, L, L]: 0 where a token attends, else -inf.

        Its rows start at multiples of 8 values, as a GPU's attention kernel wants them. With `groups` it is NaN: a
        model whose attention reads a mask and not the groups then gives outputs that find_format rejects.
        """
        if self.groups is not None:
            return torch.full((1, 1, 1, 1), torch.nan, dtype=dtype).expand(1, 1, *2 * self.sample.shape[1:])
        attends = self.sample[:, None, :, None] == self.sample[:, None, None, :]
        if self.causal:
            attends = attends.tril()
        *shape, length = attends.shape
        aligned = torch.full((*shape, -(-length // 8) * 8), -torch.inf, dtype=dtype, device=attends.device)
        return aligned[..., :length].masked_fill_(attends, 0.0)

    @property
    def given(self) -> dict[str, Any]:
        """What the model is called with, but for the mask; its layers pass `groups` on to attention.py."""
        return self.inputs if self.groups is None else {**self.inputs, "groups": self.groups}

    @property
    def equal(self) -> bool:
        """Whether every client has the same number of tokens."""
        return len(set(self.sizes)) == 1

    def to(self, device: torch.device) -> Packed:
        """The same rows on `device`."""
        inputs = {name: send(value, device) for name, value in self.inputs.items()}
        sample, position, reads = (send(value, device) for value in (self.sample, self.position, self.reads))
        learned = None if self.learned is None else self.learned.to(device)
        groups = None if self.groups is None else self.groups.to(device)
        return Packed(inputs, sample, position, reads, self.sizes, self.causal, learned, groups)


def pack(
    tokens: Tokens,
    samples: np.ndarray,
    format: PackedFormat,
    *,
    equal: bool = False,
    flat: bool = False,
    pad_id: int = 0,
    length: int | None = None,
) -> Packed:
    """The samples [C, m] of C clients (-1: none) in as few tokens as first-fit by falling length finds.

    equal: the same number of rows for every client, which costs padding. flat: all in one row instead, without any.
    length: tokens of a row, None for the best.
    """
    each = samples.reshape(-1)
    offsets = tokens.offsets.numpy()
    lengths = np.where(each >= 0, offsets[each + 1] - offsets[each], 0)
    if flat:
        sizes, length = lengths.reshape(samples.shape).sum(axis=1), lengths.sum()
        first = np.repeat(np.cumsum(sizes) - sizes, samples.shape[1])
        begin = np.where(lengths > 0, np.cumsum(lengths) - lengths, first)
    else:
        row, start, counts, length = _place(lengths.reshape(samples.shape), equal, length)
        first = (np.cumsum(counts) - counts)[:, None]
        begin, sizes = ((first + row) * length + start).reshape(-1), counts * length
    total, length = int(sizes.sum()), int(length)
    sample = np.repeat(np.arange(len(each)), lengths)
    position = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place, source = begin[sample] + position, torch.from_numpy(offsets[each[sample]] + position)
    ids, last = tokens.input_ids[source], np.zeros(len(each), np.int64)
    read = (ids != pad_id).numpy()
    np.maximum.at(last, sample[read], position[read])

    def laid(values: np.ndarray | Tensor, fill: int = 0) -> Tensor:
        grid = torch.full((total,), fill)
        grid[torch.from_numpy(place)] = torch.as_tensor(values).long()
        return grid.view(-1, length)

    positions = laid(position + format.first_position, fill=format.first_position)
    inputs = {"input_ids": laid(ids, fill=pad_id), "position_ids": positions}
    if tokens.token_type_ids is not None:
        inputs["token_type_ids"] = laid(tokens.token_type_ids[source])
    reads = torch.from_numpy(begin + last if format.causal else begin)
    learned = LearnedTokens.within(tokens, each, begin)
    groups = SampleGroups.of(begin, lengths, format.causal) if flat else None
    placed = laid(sample, fill=-1), laid(position), reads
    return Packed(inputs, *placed, sizes.tolist(), format.causal, learned, groups)


def _place(lengths: np.ndarray, equal: bool, length: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Where each sample goes: its row among its client's and its start there [C, m], each client's rows [C], and the
    tokens of a row: `length`, or the number with which all rows cost least. lengths [C, m], 0 for none."""
    order = np.argsort(-lengths, axis=1, kind="stable")
    falling = np.take_along_axis(lengths, order, axis=1)
    longest = max(1, int(falling.max()))
    widths = np.unique(np.linspace(longest, 2 * longest, _CANDIDATES).round().astype(int))
    if length is not None:
        widths = np.array([length])
    rows, starts, counts = _first_fit(falling, widths)
    if equal:
        counts[:] = counts.max(axis=1, keepdims=True)
    best = int((counts.sum(axis=1) * widths * (1 + widths / _ATTENTION)).argmin())
    row, start = np.empty_like(rows[best]), np.empty_like(starts[best])
    for placed, found in ((row, rows[best]), (start, starts[best])):
        np.put_along_axis(placed, order, found, axis=1)
    return row, start, counts[best], int(widths[best])


def _first_fit(falling: np.ndarray, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Puts each sample, longest first, in its client's first row with room, for each of W widths of the rows: row and
    start [W, C, m], and rows of each client [W, C], at least 1."""
    tried, clients = np.ogrid[: len(widths), : len(falling)]
    room = np.tile(widths[:, None, None], (1, *falling.shape))
    rows, starts = np.zeros_like(room), np.zeros_like(room)
    for sample, size in enumerate(falling.T):
        row = (room[..., : sample + 1] >= size[:, None]).argmax(axis=2)
        left = room[tried, clients, row]
        rows[..., sample] = row
        starts[..., sample] = np.where(size > 0, widths[:, None] - left, 0)
        room[tried, clients, row] = left - size
    return rows, starts, rows.max(axis=2) + 1


def find_format(
    model: nn.Module,
    tokens: Tokens,
    padded: Callable[[Tensor], Tensor],
    packed: Callable[[Packed], Tensor],
    tolerance: float,
    pad_id: int = 0,
    flat: bool = False,
) -> PackedFormat | None:
    """The format in which the model gives the same outputs for packed samples as for padded ones; None if there is
    none, or the samples do not distinguish the formats.

    padded, packed: outputs [n, L] of samples given as indices [n], and of packed rows of one client. Tried on four
    samples, from the shortest to the longest, in one row at least as long as any: both ways to attend, with positions
    from 0 or, as RoBERTa has them, after the padding's. flat: see pack.
    tolerance: of the outputs' difference, relative to the samples' own differences.
    """
    index = tokens.lengths.argsort(stable=True)[torch.linspace(0, len(tokens) - 1, min(4, len(tokens))).long()]
    length = max(int(tokens.lengths[index].sum()), 2 * int(tokens.lengths.max()))
    expected = padded(index)
    firsts = {0, *(1 + m.padding_idx for n, m in model.named_modules() if _counts_from_padding(n, m))}
    spread = float((expected - expected.mean(dim=0)).norm())
    tried: list[tuple[float, PackedFormat]] = []
    for format in (PackedFormat(causal, first) for first in firsts for causal in (False, True)):
        with suppress(Exception):  # the model's own code, which may fail in any way
            found = packed(pack(tokens, index[None].numpy(), format, flat=flat, pad_id=pad_id, length=length))
            if found.shape == expected.shape:
                tried.append((float((found - expected).norm()), format))
    if not tried:
        return None
    (apart, format), *others = sorted(tried, key=itemgetter(0))
    alone = not others or apart < others[0][0] / 3
    return format if alone and apart < tolerance * spread else None


def attention_window(model: nn.Module) -> float:
    """Tokens of the shortest window of the model's attention, inf without one.

    Longer samples cannot be packed: one mask serves all layers of packed rows, also those with a window.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((window for window in windows if isinstance(window, int)), default=math.inf)


def _counts_from_padding(name: str, module: nn.Module) -> bool:
    return name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None
