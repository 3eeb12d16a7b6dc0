"""Samples with the same text, which must not lie on both sides of a hold-out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Texts = Sequence[Sequence[str]]  # one or two columns of n texts


def comparable(text: str) -> str:
    """Equal for texts that differ only in line ends or in blanks at both ends."""
    return "\n".join(text.splitlines()).strip()


def first_with_same_text(texts: Texts) -> np.ndarray:
    """The first sample with the same text, or pair of texts, as each of n samples: int64 [n]."""
    first: dict[tuple[str, ...], int] = {}
    return np.array([first.setdefault(each, row) for row, each in enumerate(_comparable(texts))], np.int64)


def count_shared(texts: Texts, others: Texts) -> int:
    """How many samples of `texts` have a text, or pair of texts, that `others` have too."""
    known = set(_comparable(others))
    return sum(each in known for each in _comparable(texts))


def count_relabelled(texts: Texts, labels: np.ndarray) -> int:
    """How many texts occur with different labels."""
    first = first_with_same_text(texts)
    return len(np.unique(first[labels != labels[first]]))


def _comparable(texts: Texts) -> Iterator[tuple[str, ...]]:
    return zip(*([comparable(text) for text in column] for column in texts), strict=True)
