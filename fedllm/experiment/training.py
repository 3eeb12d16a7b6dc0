"""Trains the rounds of a run. All files of a round are on disk before the next round begins."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedllm.common.console import RoundProgress, say, warn
from fedllm.common.files import replace_text
from fedllm.common.profiling import Profile, end_round, running, section
from fedllm.config.recipe import Recipe
from fedllm.experiment.build import ReadCache, build_together
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.client_scores import evaluate_own
from fedllm.experiment.evaluation import evaluate
from fedllm.experiment.job import Job
from fedllm.experiment.personal import evaluate_clients
from fedllm.experiment.records import RoundRecord, append_line
from fedllm.experiment.round_source import RoundSource
from fedllm.experiment.session import Session
from fedllm.experiment.stopping import StopRequests, stopped
from fedllm.experiment.trackers import Trackers
from fedllm.federation.executor import Executor
from fedllm.federation.rounds import Plan, RoundReport, run_round
from fedllm.federation.sampling import sample
from fedllm.results.format import round_to
from fedllm.tasks.base import lower_is_better


class ThisMachine:
    """Rounds of clients that this process trains, together with the other processes of its launcher."""

    def build(self, recipe: Recipe, cache: ReadCache | None, executor: Executor) -> Job:
        return build_together(recipe, cache, executor)

    def begin(self, session: Session) -> None:
        """Nothing is to be done."""

    def train(self, session: Session, clients: Sequence[int], tracked: Sequence[int], plan: Plan) -> RoundReport:
        return run_round(session.job.setup, session.state, clients, tracked, plan)

    def evaluate(self, session: Session) -> dict[str, Any]:
        given = session.job, session.state, session.executor
        began = time.perf_counter()
        found = evaluate(*given) if session.job.problem.personal is None else evaluate_clients(*given)
        if own := evaluate_own(session):
            found |= {**own, "eval_seconds": round_to(time.perf_counter() - began)}
        return found


def train(
    session: Session, checkpoints: Checkpoints, source: RoundSource, profile: Profile | None, stop: StopRequests
) -> None:
    """Trains all remaining rounds, which `source` computes.

    Raises Interrupted after a round with a checkpoint if `stop` asks for it."""
    recipe, state, executor = session.job.recipe, session.state, session.executor
    total, path = session.job.info.total, session.folder / "metrics.jsonl"
    executor.on_first(lambda: replace_text(path, "".join(json.dumps(line) + "\n" for line in session.metrics)))
    names = recipe.run.trackers if executor.rank == 0 else []
    trackers = Trackers(names, session.folder, state.round, recipe.sections())
    with RoundProgress(total, state.round) as progress, trackers, running(profile), stop.in_rounds():
        shared = (session.facts.stacked_clients, recipe.federation.min_clients, progress.step, session.facts.shares)
        plan = Plan(*shared, executor)
        while not session.complete:
            record, plan = _train_round(session, source, plan)
            line = executor.on_first(lambda record=record: append_line(path, record.line()))  # type: ignore[misc]
            session.metrics.append(line)
            trackers.write(line)
            progress.finish(state.round, _note(session))
            reason = stop.agreed(executor, recipe.run.max_hours)
            best = recipe.eval.keep_best and session.best_round == state.round
            if session.complete or reason or best or state.round % recipe.run.checkpoint_every == 0:
                with section("checkpoint"):
                    _save(session, checkpoints)
            end_round(state.round)
            _say_budget(session)
            if reason and not session.complete:
                raise stopped(f"{session.folder}: stopped after round {state.round}", reason)


def _train_round(session: Session, source: RoundSource, plan: Plan) -> tuple[RoundRecord, Plan]:
    """One round with its evaluation, and the plan of the next round."""
    job, state = session.job, session.state
    recipe, info = job.recipe, job.info
    began = time.perf_counter()
    numbers = (info.num_clients, info.sampled, info.tracked)
    clients, tracked = sample(recipe.run.seed, state.round, *numbers, recipe.federation.sampling)
    due = (state.round + 1) % recipe.eval.every == 0 or state.round + 1 == job.last_round
    report = source.train(session, clients, tracked, replace(plan, products=job.products if due else ()))
    for client, why in report.rejected.items():
        warn(f"round {state.round}: client {client} rejected: {why}")
    plan = _step_down(session, plan, report)
    record = RoundRecord.of(job, state.round, report, time.perf_counter() - began)
    if due:
        with section("evaluate"):
            record = replace(record, scores=source.evaluate(session))
            if (guarantee := job.guarantee) is not None:
                spent = session.executor.on_first(lambda: guarantee.entries(state.round))
                record = replace(record, privacy={**record.privacy, **spent})
        _note_cuts(session)
    return record, plan


def _save(session: Session, checkpoints: Checkpoints) -> None:
    """Writes a checkpoint on rank 0, after it has collected all clients' vectors."""
    session.executor.fetch(session.state.clients)
    best = session.best_round if session.job.recipe.eval.keep_best else None
    session.executor.on_first(lambda: checkpoints.save(session.state, session.metrics, session.facts, best).name)


def _step_down(session: Session, plan: Plan, report: RoundReport) -> Plan:
    """The plan, with fewer clients trained together if a process ran out of memory. A resumed run uses it too."""
    if (forced := report.forced) is None:
        return plan
    round = session.state.round
    warn(
        f"round {round}: {plan.stacked_clients} clients together do not fit into memory; that round was done with "
        f"{forced} together, and so will be the rest (the same result up to rounding)"
    )
    session.facts.stacked_clients = forced
    session.facts.stepped_down.append({"round": round, "stacked_clients": forced})
    return replace(plan, stacked_clients=forced)


def _note_cuts(session: Session) -> None:
    """Prints and records that some process ran out of memory in an evaluation and used smaller batches."""
    cuts, round = session.job.problem.eval_cuts, session.state.round
    if cuts == session.facts.eval_cuts:
        return
    warn(
        f"round {round}: the batches of the evaluation do not fit into memory; they are cut into {cuts} from here on "
        f"(the same result up to rounding)"
    )
    session.facts.eval_cuts = cuts
    session.facts.stepped_down.append({"round": round, "eval_cuts": cuts})


def _say_budget(session: Session) -> None:
    """Says that the run ends because the next round would exceed privacy.epsilon, where it does."""
    privacy, last, total = session.job.recipe.privacy, session.job.last_round, session.job.info.total
    if privacy is not None and last < total and session.state.round == last:
        say(f"privacy: the run ends after round {last} of {total}: one more would exceed epsilon {privacy.epsilon:g}")


def _note(session: Session) -> str:
    """A short text with the last round's figures."""
    name = session.best_by
    best = min if lower_is_better(name) else max
    scores = [line[name] for line in session.metrics if line.get(name) is not None]
    loss = session.metrics[-1]["train_loss"]
    parts = [f"train loss {loss:.4f}"] if loss is not None else []
    return "  ".join([*parts, *([f"{name} {scores[-1]:.4f} (best {best(scores):.4f})"] if scores else [])])
