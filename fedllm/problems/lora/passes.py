"""How the clients of a step are cut into passes, so that the memory of each is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedllm.problems.lora.memory_probe import PassMemory


@dataclass
class Passes:
    """Passes of at most `tokens` tokens, but of at least one client. memory: what a pass saves for its backward."""

    memory: PassMemory
    tokens: float

    @classmethod
    def within(cls, memory: PassMemory, most: float, tokens: int = 0) -> Passes:
        """Passes whose tokens save at most `most` bytes for the backward pass; or as many as `tokens` tokens save, if
        that is more, but at most four times `most`."""
        return cls(memory, max(most, min(tokens * memory.token, 4 * most)) / memory.token)

    def cut(self, sizes: Sequence[int]) -> Iterator[slice]:
        """Slices of neighbouring clients, in order, one per pass. sizes: tokens that each client takes."""
        begin = tokens = 0
        for client, size in enumerate(sizes):
            if begin < client and tokens + size > self.tokens:
                yield slice(begin, client)
                begin, tokens = client, 0
            tokens += size
        yield slice(begin, len(sizes))

    def largest(self, sizes: Sequence[int]) -> int:
        """Tokens of the largest of these passes."""
        return max(sum(sizes[some]) for some in self.cut(sizes))
