"""Samples that clients hold out of their own training samples, and clients that are held out as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedllm.common.seeding import numpy_rng
from fedllm.data.repeats import first_with_same_text
from fedllm.data.split import Split


def draw_held_out(count: int, number: int, seed: int) -> list[int]:
    """`number` of `count` clients, which never train; sorted."""
    return sorted(numpy_rng(seed, "held-out clients").permutation(count)[:number].tolist())


def hold_out_own(
    split: Split, parts: Sequence[np.ndarray], fractions: Sequence[float], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The samples that each client keeps for training, and those that it holds out; both sorted indices into `split`.

    fractions: how much of its distinct samples each client holds out, at random by (seed, client). With 0 it holds out
    nothing; below 1 at least one sample, and it keeps at least one. Samples with the same text, prompt or image stay
    together. One that another client has too is never held out, since the other one may train on it; so a client whose
    samples all are such holds out nothing, also with 1, which is all that it alone has.
    """
    first = first_with_same_text(split.contents)
    kept, held = [], []
    alone = _at_one_client(first, parts)
    for client, (part, fraction) in enumerate(zip(parts, fractions, strict=True)):
        part = np.sort(part)
        distinct = np.unique(first[part])
        own = distinct[alone[distinct]]
        most = len(distinct) - (fraction < 1)
        count = min(max(round(fraction * len(distinct)), int(fraction > 0)), most, len(own))
        chosen = numpy_rng(seed, "client holdout", client).permutation(own)[: max(count, 0)]
        out = np.isin(first[part], chosen)
        kept.append(part[~out])
        held.append(part[out])
    return kept, held


def _at_one_client(first: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Whether the samples with the same text as sample n are all at one client: bool [n], at the first of them."""
    lowest, highest = np.full(len(first), len(parts)), np.full(len(first), -1)
    for client, part in enumerate(parts):
        np.minimum.at(lowest, first[part], client)
        np.maximum.at(highest, first[part], client)
    alone: np.ndarray = lowest == highest
    return alone
