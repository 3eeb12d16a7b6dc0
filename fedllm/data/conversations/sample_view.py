"""A sample of a causal language model as the model sees it, as text for the terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from fedllm.data.tokenization import Tokens

BEGIN, END = "⟦", "⟧"  # around what is learned


def marked_text(tokens: Tokens, sample: int, tokenizer: Any) -> str:
    """The text of a sample's tokens with special tokens, and what is learned between BEGIN and END."""
    start, end = tokens.offsets[sample : sample + 2].tolist()
    assert tokens.learned is not None, "only a causal language model learns tokens"
    marked = zip(tokens.input_ids[start:end].tolist(), tokens.learned[start:end].tolist(), strict=True)
    parts = []
    for learned, run in groupby(marked, key=lambda pair: pair[1]):
        text = tokenizer.decode([index for index, _ in run], skip_special_tokens=False)
        parts.append(f"{BEGIN}{text}{END}" if learned else text)
    return _visible("".join(parts))


def learned_share(tokens: Tokens) -> str:
    """How many of the tokens are learned: "9,401 of 36,729 tokens are learned (26%)"."""
    learned, total = int(tokens.sizes.sum()), len(tokens.input_ids)
    return f"{learned:,} of {total:,} tokens are learned ({learned / total:.0%})"


def _visible(text: str) -> str:
    """The text with control codes, which a terminal would obey, as \\x1b; line ends stay."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )
