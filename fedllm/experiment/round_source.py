"""The interface of what computes the rounds of a run: this machine, real sites, or Flower's simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fedllm.config.recipe import Recipe
from fedllm.experiment.build import ReadCache
from fedllm.experiment.job import Job
from fedllm.federation.executor import Executor
from fedllm.federation.rounds import Plan, RoundReport

if TYPE_CHECKING:
    from fedllm.experiment.session import Session


class RoundSource(Protocol):
    """What computes the rounds: training.ThisMachine, serve.RealSites or flower_engine.FlowerSimulation."""

    def build(self, recipe: Recipe, cache: ReadCache | None, executor: Executor) -> Job:
        """The job of this process. Raises UserError for a recipe that it cannot run."""

    def begin(self, session: Session) -> None:
        """Called once, before the first round of this process."""

    def train(self, session: Session, clients: Sequence[int], tracked: Sequence[int], plan: Plan) -> RoundReport:
        """Computes a round. session.state changes only if everything has succeeded; see rounds.run_round."""

    def evaluate(self, session: Session) -> dict[str, Any]:
        """The scores of session.state for metrics.jsonl; see evaluation.evaluate."""
