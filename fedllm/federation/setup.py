"""The objects that every round uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.uploads import Declared
from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.problems.base import Problem

BUFFERS = "buffers"  # the name under which a problem's buffers are sent and kept, beside the algorithm's vectors
PERSONAL = "personal"  # the name under which a client keeps its values of the problem's personal coordinates


@dataclass(frozen=True)
class Setup:
    """The algorithm, the problem that gives its gradients, the facts of the round, and the steps on its uploads."""

    algorithm: Algorithm
    problem: Problem
    info: RoundInfo
    pipeline: Pipeline = Pipeline()

    def at(self, round: int) -> Setup:
        """The same in another round, counted from 0."""
        return replace(self, info=replace(self.info, index=round))

    def declared(self, x: Tensor) -> Declared:
        """The vectors that the algorithm declares for a model x [d], the problem's buffers, and what is personal."""
        declared, buffers = Declared.by(self.algorithm, x, self.info), self.problem.buffers
        if (places := self.problem.personal) is not None:
            declared = replace(declared, kept=declared.kept | {PERSONAL: len(places)})
        if buffers is None:
            return declared
        also = {BUFFERS: len(buffers.initial)}
        return replace(declared, sent=declared.sent | also, kept=declared.kept | (also if buffers.local else {}))
