"""Rounds that train sets of coordinates in turn, such as the B and the A of LoRA; the others stay as they are.

A round of a turn is a round of the model that has the turn's coordinates alone: x, the vectors of server and clients,
blocks and gradients are cut to them, and put back at its end. So no algorithm knows of it, the other coordinates
neither decay nor lose what belongs to them, and clients send the turn's coordinates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedllm.algorithms.base import Contrast, RoundInfo
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.common.tensors import State
from fedllm.problems.base import Problem


@dataclass(frozen=True)
class Turn:
    """A set of the d coordinates of a model.

    coordinates [n]: in rising order. blocks: their partition. block_numbers [b]: those of its blocks in the partition
    of all coordinates, which has `of_blocks` blocks.
    """

    coordinates: Tensor
    blocks: BlockPartition
    block_numbers: Tensor
    of_blocks: int

    def take(self, vector: Tensor) -> Tensor:
        """A copy of the turn's part [..., n] or [..., b] of a vector [..., d] or [..., B]."""
        return vector[..., self._places(vector)]

    def put(self, vector: Tensor, part: Tensor) -> Tensor:
        """A copy of the vector with this part of it."""
        return vector.index_copy(-1, self._places(vector), part)

    def take_all(self, vectors: State) -> State:
        """`take` for each vector."""
        return {name: self.take(value) for name, value in vectors.items()}

    def put_all(self, vectors: State, parts: State) -> State:
        """`put` for each vector."""
        return {name: self.put(value, parts[name]) for name, value in vectors.items()}

    def facts(self, info: RoundInfo) -> RoundInfo:
        """What algorithms are told of a round of this turn: its blocks alone."""
        return replace(info, blocks=self.blocks)

    def _places(self, vector: Tensor) -> Tensor:
        """A vector of B numbers has one per block; where B is d, blocks and coordinates are the same."""
        places = self.block_numbers if vector.shape[-1] == self.of_blocks else self.coordinates
        return places.to(vector.device)


def make_turns(sets: Sequence[Tensor], blocks: BlockPartition) -> tuple[Turn, ...]:
    """The turns of rounds 1, 2, ... over these sets of coordinates of the partition.

    Raises UserError unless each coordinate is in exactly one of two or more sets, and each block in one set."""
    joined = torch.cat(list(sets)) if sets else torch.zeros(0)
    if len(sets) < 2 or not torch.equal(joined.sort().values, torch.arange(blocks.dim)):
        raise UserError(
            f"turns: found {len(sets)} sets with {len(joined):,} coordinates in all, expected two sets or more with "
            f"each of the {blocks.dim:,} coordinates in exactly one"
        )
    found = []
    for number, chosen in enumerate(sets, start=1):
        rising = chosen.sort().values
        if not len(rising):
            raise UserError(f"turns: set {number} is empty, expected one coordinate or more")
        try:
            part, numbers = blocks.select(rising)
        except ValueError as error:
            raise UserError(f"turns: set {number} divides a tensor with blocks: {error}") from error
        found.append(Turn(rising, part, numbers, blocks.num_blocks))
    return tuple(found)


class TurnProblem(Problem):
    """The clients of `problem` in a round of a turn: they train its coordinates, and read the others from x [d]."""

    def __init__(self, problem: Problem, turn: Turn, x: Tensor) -> None:
        self.dim, self.num_clients, self.blocks = len(turn.coordinates), problem.num_clients, turn.blocks
        self.smaller_steps = problem.smaller_steps
        self._problem, self._turn, self._x = problem, turn, x

    def initial(self) -> Tensor:
        return self._turn.take(self._problem.initial())

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return self.loss_and_gradient(X, clients, round, step)[1]

    def loss_and_gradient(
        self, X: Tensor, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        loss, g = self._problem.loss_and_gradient(self._whole(X), clients, round, step)
        return loss, self._turn.take(g)

    def contrastive_gradient(
        self, X: Tensor, contrast: Contrast, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor | None, Tensor]:
        whole = replace(contrast, near=self._whole(contrast.near), far=self._whole(contrast.far))
        loss, g = self._problem.contrastive_gradient(self._whole(X), whole, clients, round, step)
        return loss, self._turn.take(g)

    def steps(self, clients: Sequence[int], round: int) -> Tensor | None:
        return self._problem.steps(clients, round)

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return self._problem.sizes(clients)

    def _whole(self, X: Tensor) -> Tensor:
        """Rows [C, d] with these coordinates [C, n]."""
        return self._turn.put(self._x.expand(len(X), -1), X)
