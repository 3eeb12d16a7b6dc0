"""The objects that every round uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.settings import EXACT, DownloadsSettings
from fedllm.aggregation.uploads import Declared
from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.federation.turns import Turn, TurnProblem
from fedllm.problems.base import Problem

BUFFERS = "buffers"  # the name under which a problem's buffers are sent and kept, beside the algorithm's vectors
PERSONAL = "personal"  # the name under which a client keeps its values of the problem's personal coordinates


@dataclass(frozen=True)
class Setup:
    """The algorithm, the problem that gives its gradients, the facts of the round, the steps on its uploads, what
    happens to what the server sends, and the sets of coordinates that the rounds train in turn, () for all at once."""

    algorithm: Algorithm
    problem: Problem
    info: RoundInfo
    pipeline: Pipeline = Pipeline()
    downloads: DownloadsSettings = EXACT
    turns: tuple[Turn, ...] = ()

    def at(self, round: int) -> Setup:
        """The same in another round, counted from 0."""
        return replace(self, info=replace(self.info, index=round))

    @property
    def turn(self) -> Turn | None:
        """What this round trains; None for all coordinates."""
        return self.turns[self.info.index % len(self.turns)] if self.turns else None

    def in_turn(self, turn: Turn, x: Tensor) -> Setup:
        """The same for the coordinates of one turn. x [d]: where clients read the others."""
        problem = TurnProblem(self.problem, turn, x)
        return replace(self, problem=problem, info=turn.facts(self.info), turns=())

    def require_private(self) -> None:
        """Raises UserError where client-level privacy does not cover all that clients send."""
        if self.pipeline.private:
            x = torch.empty(self.problem.dim)
            self.pipeline.reduction(self.algorithm, self.declared(x), self.info, x.device)

    def declared(self, x: Tensor) -> Declared:
        """The vectors that the algorithm declares for a model x [d], the problem's buffers, and what is personal."""
        declared, buffers = Declared.by(self.algorithm, x, self.info), self.problem.buffers
        if (places := self.problem.personal) is not None:
            declared = replace(declared, kept=declared.kept | {PERSONAL: len(places)})
        if buffers is None:
            return declared
        also = {BUFFERS: len(buffers.initial)}
        return replace(declared, sent=declared.sent | also, kept=declared.kept | (also if buffers.local else {}))
