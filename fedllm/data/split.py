"""A split of a data set: labelled texts or images, or conversations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedllm.data.conversations.conversation import Conversation, prompts

if TYPE_CHECKING:
    from fedllm.data.arrow_files import Columns


@dataclass(frozen=True)
class Split:
    """n labelled examples, or n conversations.

    texts: one or two columns of n texts; [] for conversations and images.
    labels: int64 class ids or float32 targets [n]; of conversations, which have none, the ids of their groups.
    columns: the table's other columns by name, each with n values (partition.column names one of them).
    rows: the row of each example in its file, from 1, int64 [n]; None for a split that was not read from a file.
    conversations: what a causal language model learns [n]; None for labelled samples. images: uint8 [n, 3, S, S], None
    for texts.
    """

    texts: list[list[str]]
    labels: np.ndarray
    columns: Columns
    rows: np.ndarray | None = None
    conversations: list[Conversation] | None = None
    images: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def kind(self) -> str:
        """What tells samples apart, in one word."""
        if self.images is not None:
            return "image"
        return "text" if self.conversations is None else "prompt"

    @cached_property
    def contents(self) -> list[list[str]]:
        """Columns of n texts that tell samples apart in a hold-out: the texts, the prompts of conversations, a digest
        of each image."""
        if self.images is not None:
            return [[hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest() for image in self.images]]
        return self.texts if self.conversations is None else [prompts(self.conversations)]

    def take(self, rows: np.ndarray) -> Split:
        """The examples at `rows`, in that order."""
        picked = rows.tolist()
        texts = [[column[row] for row in picked] for column in self.texts]
        columns = {name: [values[row] for row in picked] for name, values in self.columns.items()}
        return Split(
            texts,
            self.labels[rows],
            columns,
            None if self.rows is None else self.rows[rows],
            None if self.conversations is None else [self.conversations[row] for row in picked],
            None if self.images is None else self.images[rows],
        )

    def fingerprint(self) -> str:
        """sha256 of the texts or images and labels, or of the conversations, the same on every machine."""
        if self.conversations is not None:
            told = "\n".join(conversation.exact() for conversation in self.conversations)
            return hashlib.sha256(f"{len(self)} conversations\n{told}".encode()).hexdigest()
        digest = hashlib.sha256(f"{len(self)} {len(self.texts)} {self.labels.dtype.kind}".encode())
        if self.images is not None:
            digest.update(f"{self.images.shape}".encode())
            digest.update(np.ascontiguousarray(self.images).tobytes())
        for column in self.texts:
            digest.update(np.fromiter(map(len, column), "<i8").tobytes())
            digest.update("".join(column).encode())
        digest.update(self.labels.astype(self.labels.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()
