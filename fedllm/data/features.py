"""Features of samples that need no model: hashed counts of words for texts, mean colours for images.

All features are whole numbers, so that sums and products of them have the same bits on every machine, in any order.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np

from fedllm.data.split import Split

Features = Callable[[np.ndarray], np.ndarray]
"""Features of the samples at some rows [m]: whole numbers as float64 [m, D]."""

WORD_BUCKETS = 1024
TEXT_SCALE = 256  # the length of a text's vector
GRID = 4  # an image is cut into GRID x GRID parts
_IDF_SCALE = 64
# A word is a run of letters and digits; of Chinese, Japanese and Korean, which have few blanks, a single character.
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")


def features_of(split: Split, fit: np.ndarray) -> Features:
    """The features of the samples of a split. fit: the rows from which the weights of words are counted."""
    images = split.images
    if images is not None:
        return lambda rows: _mean_colours(images[rows])
    texts = _texts(split)
    weights = _word_weights(_bucket_counts(texts, fit))
    return lambda rows: _to_length(_bucket_counts(texts, rows) * weights)


def _texts(split: Split) -> list[str]:
    """One text per sample: its columns, or all messages of its conversation."""
    if split.conversations is not None:
        return ["\n".join(message.whole for message in each.messages) for each in split.conversations]
    return ["\n".join(columns) for columns in zip(*split.texts, strict=True)]


def _bucket_counts(texts: list[str], rows: np.ndarray) -> np.ndarray:
    """How often words of each bucket (a hash of the lower-case word) occur in each text, float64 [m, WORD_BUCKETS]."""
    counts = np.zeros((len(rows), WORD_BUCKETS))
    for place, row in enumerate(rows.tolist()):
        words = _WORD.findall(texts[row].lower())
        buckets = [zlib.crc32(word.encode("utf-8", "replace")) % WORD_BUCKETS for word in words]
        counts[place] = np.bincount(np.array(buckets, np.int64), minlength=WORD_BUCKETS)
    return counts


def _word_weights(counts: np.ndarray) -> np.ndarray:
    """The inverse document frequency of each bucket, log((1 + m) / (1 + texts that have it)), in steps of 1/64."""
    found = np.log((1 + len(counts)) / (1 + (counts > 0).sum(axis=0)))
    weights: np.ndarray = np.rint(_IDF_SCALE * found)
    return weights


def _to_length(vectors: np.ndarray) -> np.ndarray:
    """Each row with length TEXT_SCALE, rounded to whole numbers; a row of zeros stays."""
    lengths = np.sqrt((vectors**2).sum(axis=1, keepdims=True))
    scaled: np.ndarray = np.rint(TEXT_SCALE * vectors / np.maximum(lengths, 1))
    return scaled


def _mean_colours(images: np.ndarray) -> np.ndarray:
    """The mean of each colour in each part of the images uint8 [m, 3, S, S], rounded: float64 [m, 3 GRID^2]."""
    parts = min(GRID, images.shape[-1])
    starts = np.arange(parts) * images.shape[-1] // parts
    sums = np.add.reduceat(np.add.reduceat(images.astype(np.int64), starts, axis=2), starts, axis=3)
    sides = np.diff([*starts, images.shape[-1]])
    means: np.ndarray = np.rint(sums / np.outer(sides, sides)).reshape(len(images), -1)
    return means
