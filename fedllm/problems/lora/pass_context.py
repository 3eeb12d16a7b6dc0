"""What the modules of a stacked model share: the pass under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedllm.problems.lora.dropout import Dropout
from fedllm.problems.lora.learned_tokens import LearnedTokens
from fedllm.problems.lora.packing import Packed


@dataclass
class Pass:
    """One forward pass for C clients.

    parameters: {name: [C, *shape]}, the clients' trainable values. dropout: None for a pass without. packed: the packed
    rows, None where each row is one sample. learned: the tokens to predict, None for a classifier. mask [R, 1, L, L]:
    the packed rows' attention mask (see Packed.mask). uses: how often the pass has used each dropout layer; ALBERT, for
    example, uses one layer at every depth.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    dropout: Dropout | None = None
    packed: Packed | None = None
    learned: LearnedTokens | None = None
    mask: Tensor | None = None
    uses: Counter[int] = field(default_factory=Counter)

    def by_rows(self, x: Tensor) -> Tensor:
        """The tokens [rows, L, F] that an adapter reads, also from a model that lays them end to end, [rows * L, F], or
        cuts each row into windows, [rows * windows, tokens, F], as Swin does.

        A pass of one sample per row without dropout does not depend on the rows, and gets x as it is.
        """
        rows = len(self.packed.sample) if self.packed else self.dropout.rows if self.dropout else 0
        apart = x.dim() == 2 or (x.dim() == 3 and self.packed is None and len(x) != rows)
        return x.reshape(rows, -1, x.shape[-1]) if rows and apart else x

    def drop(self, x: Tensor, rate: float, layer: int) -> Tensor:
        """Dropout of x [samples, F] or [rows, L, F] by the layer of this number, and one more use of that layer."""
        if self.dropout is None:
            return x
        use = self.uses[layer]
        self.uses[layer] += 1
        return self.dropout(x, rate, layer, use)

    def fork(self) -> Pass:
        """The same pass with counters of its own."""
        return replace(self, uses=self.uses.copy())


class PassContext:
    """Holds the pass under way. current: that pass, or an empty one between passes."""

    def __init__(self) -> None:
        self.current = Pass()

    @contextmanager
    def run(self, wanted: Pass) -> Iterator[None]:
        """Makes `wanted` the pass under way until the block ends."""
        before, self.current = self.current, wanted
        try:
            yield
        finally:
            self.current = before
