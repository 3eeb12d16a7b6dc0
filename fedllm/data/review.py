"""Warnings about data that were read as asked for, but perhaps not as meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedllm.common.errors import cut_name, listed
from fedllm.data.repeats import count_relabelled, count_shared

if TYPE_CHECKING:
    from fedllm.data.split import Split

MAJORITY = 0.75  # from this share of one class on, accuracy says little


def review(train: Split, validation: Split, classes: Sequence[str]) -> list[str]:
    """The warnings about two splits. classes: their names in the order of their ids, () for a regression and for
    conversations."""
    found = [*_repeated_texts(train, validation)]
    if classes:
        counts = [np.bincount(split.labels, minlength=len(classes)) for split in (train, validation)]
        found += [*_similar_names(classes), *_single_samples(counts[0] + counts[1], classes)]
        found += _majority(counts[1], classes)
    return found


def _repeated_texts(train: Split, validation: Split) -> list[str]:
    found, what = [], train.kind
    if shared := count_shared(validation.contents, train.contents):
        whole = "all" if shared == len(validation) else f"{shared:,} of"
        article = "an" if what == "image" else "a"
        found.append(
            f"{whole} {len(validation):,} validation samples have {article} {what} that the training split has too; "
            f"their scores do not show how the model does on new {what}s"
        )
    if train.conversations is not None:
        return found
    texts = [[*ours, *theirs] for ours, theirs in zip(train.contents, validation.contents, strict=True)]
    if relabelled := count_relabelled(texts, np.concatenate([train.labels, validation.labels])):
        found.append(f"{what}s that have different labels in different rows: {relabelled:,}")
    return found


def _similar_names(classes: Sequence[str]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(name.casefold().split()), []).append(name)
    return [
        f"the classes {listed(names)} differ only in case or blanks; correct the labels if they are one class"
        for names in alike.values()
        if len(names) > 1
    ]


def _single_samples(counts: np.ndarray, classes: Sequence[str]) -> list[str]:
    names = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    return [f"classes with one sample only: {listed(names)}"] if names else []


def _majority(counts: np.ndarray, classes: Sequence[str]) -> list[str]:
    share = counts.max() / counts.sum()
    if share < MAJORITY:
        return []
    return [
        f"{share:.0%} of the validation samples are of class '{cut_name(classes[int(counts.argmax())])}': "
        f"a model that always answers so has accuracy {share:.3f}"
    ]
