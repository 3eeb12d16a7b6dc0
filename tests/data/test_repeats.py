"""Samples with the same text."""

from __future__ import annotations

import numpy as np

from fedllm.data.repeats import count_relabelled, count_shared, first_with_same_text


def test_line_ends_and_blanks_at_both_ends_do_not_count() -> None:
    texts = [["a\nb", " a\r\nb\n", "A\nb", "a b", "a\nb"]]
    assert first_with_same_text(texts).tolist() == [0, 0, 2, 3, 0]


def test_pairs_are_the_same_where_both_texts_are() -> None:
    pairs = [["q", "q", "q"], ["a", "b", "a"]]
    assert first_with_same_text(pairs).tolist() == [0, 1, 0]
    assert count_shared([["q", "q"], ["c", "b"]], pairs) == 1


def test_a_text_with_two_labels_counts_once() -> None:
    assert count_relabelled([["a", "a", "a", "b", "b", "c"]], np.array([0, 1, 1, 0, 0, 1])) == 1
