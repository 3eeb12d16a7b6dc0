"""One run at one site: its data and model, its state between rounds, its local steps and its scores."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedllm.aggregation.uploads import Declared
from fedllm.common.console import say, say_all
from fedllm.common.errors import UserError
from fedllm.common.files import replace_bytes
from fedllm.config.recipe import Recipe, make_recipe
from fedllm.deployment.ledger import Ledger
from fedllm.deployment.messages import Upload, check_broadcast, terms
from fedllm.deployment.outgoing import outgoing
from fedllm.deployment.site_messages import Announcement, EvaluateOrder, Joined, Scores, TrainAnswer, TrainOrder
from fedllm.experiment.build import assemble
from fedllm.experiment.evaluation import evaluate
from fedllm.experiment.parties import OneSite
from fedllm.experiment.personal import personal_model, write_personal
from fedllm.experiment.records import versions
from fedllm.experiment.sample_privacy import epsilon_of_site, private_problem
from fedllm.federation.executor import Executor
from fedllm.federation.local_training import local_steps, train_together
from fedllm.federation.setup import BUFFERS, PERSONAL
from fedllm.federation.state import FederationState, blank
from fedllm.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from fedllm.deployment.site_settings import SiteSettings
    from fedllm.federation.local_training import Trained

_KEY = 64  # hex digits of a sha256


class SiteRun:
    """What a site has built for an announced run, and what it keeps of it in `folder`.

    ledger.safetensors has the client's vectors, answer.bin the last upload with the digest of the order it answers.
    Raises UserError for a recipe, data or a folder that do not fit.
    """

    def __init__(self, told: Announcement, settings: SiteSettings, folder: Path) -> None:
        self.told, self._folder, self._name = told, folder, settings.name
        party = OneSite(told.site, told.sites, settings.train, settings.validation, told.classes)
        self.job = assemble(site_recipe(told, settings), party=party)
        spends = epsilon_of_site(self.job.recipe, len(self.job.parts[told.site]))
        say_all((*self.job.notes, *spends), self.job.dataset.warnings)
        info = replace(self.job.info, model=fingerprint(self.job.model))
        problem = private_problem(self.job.recipe, self.job.problem, self.job.parts, from_system=True)
        self._setup = replace(self.job.setup, info=info, problem=problem)
        self._blank = blank(self._setup)
        self._terms = terms(self.job.algorithm, info, self.job.recipe.uploads, self.job.recipe.downloads)
        first = self._blank.clients.get([told.site])
        self._ledger = Ledger(first, self._setup.declared(self._blank.x).kept, self._blank.x.dtype)
        if self._ledger_file.exists():
            self._ledger.load(self._ledger_file, self._terms)

    @property
    def _ledger_file(self) -> Path:
        return self._folder / "ledger.safetensors"

    @property
    def joined(self) -> Joined:
        """What the site tells the server when it joins."""
        samples = len(self.job.parts[self.told.site])
        validation = 0 if "validation" in self.job.dataset.stand_ins else len(self.job.validation)
        return Joined(self._name, samples, validation, str(self.job.machine.device), versions())

    def train(self, data: bytes, order: TrainOrder) -> bytes:
        """The answer to an order, whose bytes are `data`: the upload, after state and answer are saved.

        The same order asked again gets the same bytes. Raises UserError for an order that does not fit, RunError where
        training or saving failed; the state is then as before.
        """
        key = hashlib.sha256(data).hexdigest()
        if (saved := self._saved(key)) is not None:
            say(f"round {order.broadcast.round + 1} of {self.job.info.total}: asked again; the same upload is sent")
            return saved
        broadcast, setup = order.broadcast, self._setup.at(order.broadcast.round)
        check_broadcast(
            broadcast,
            self._blank.x,
            setup.algorithm,
            setup.info,
            self._sent_buffers(),
            self.job.recipe.uploads,
            setup.downloads,
            self.job.recipe.privacy,
            setup.turn,
        )
        self._ledger.settle(broadcast)
        trained, declared = self._steps(order)
        sent = outgoing(
            trained.uploads,
            declared,
            setup.pipeline,
            setup.algorithm,
            tracked=order.tracked,
            round=broadcast.round,
        )
        steps, samples = int(trained.rows.steps[0]), len(self.job.parts[self.told.site])
        rate_sum, start = float(trained.rows.rate_sum[0]), broadcast.start
        upload = Upload(sent, broadcast.round, steps, rate_sum, samples, order.tracked, start)
        answer = TrainAnswer(upload, _loss(trained), time.perf_counter() - trained.began).to_bytes()
        kept = {name: value.detach().cpu() for name, value in trained.uploads.kept.items()}
        kept = kept if setup.turn is None else setup.turn.put_all(self._ledger.state, kept)
        after = self._ledger.after(upload.receipt, kept)
        after.save(self._ledger_file, self._terms)
        replace_bytes(self._answer_file, (key + hashlib.sha256(answer).hexdigest()).encode() + answer)
        self._ledger = after
        self._say_trained(broadcast.round, trained, len(answer))
        return answer

    def _say_trained(self, round: int, trained: Trained, size: int) -> None:
        """One line for the site's operator."""
        loss, seconds = _loss(trained), time.perf_counter() - trained.began
        parts = [f"{seconds:.1f} s", f"{size:,} bytes to send"]
        parts = parts if loss is None else [f"train loss {loss:.4f}", *parts]
        say(f"round {round + 1} of {self.job.info.total}: {', '.join(parts)}; waiting")

    def _sent_buffers(self) -> dict[str, int]:
        """The running statistics that a broadcast has, with their number."""
        buffers = self.job.problem.buffers
        return {} if buffers is None or buffers.local else {BUFFERS: len(buffers.initial)}

    def _steps(self, order: TrainOrder) -> tuple[Trained, Declared]:
        """The local steps of this client, as in a simulation with the same (seed, round, client), and what it sends and
        keeps of this round."""
        broadcast, setup, site = order.broadcast, self._setup.at(order.broadcast.round), self.told.site
        state = replace(self._blank, round=broadcast.round, x=broadcast.x.to(self._blank.x))
        state.clients.put([site], self._ledger.state)
        if (turn := setup.turn) is not None:
            setup, state = setup.in_turn(turn, state.x), state.in_turn(turn)
        state.server = {name: value.to(state.x) for name, value in broadcast.server.items() if name != BUFFERS}
        if BUFFERS in broadcast.server:
            state.buffers = broadcast.server[BUFFERS].to(state.x)
        steps = local_steps(setup.problem, [site], setup.info)[site]
        setup.algorithm.check(setup.info, [steps])
        tracked = {site} if order.tracked else set()
        trained = train_together(setup, state, [site], [steps], tracked, lambda active: None)
        return trained, setup.declared(state.x)

    @property
    def _answer_file(self) -> Path:
        return self._folder / "answer.bin"

    def _saved(self, key: str) -> bytes | None:
        """The answer that was saved for this order; None if there is none, or it is damaged."""
        try:
            with self._answer_file.open("rb") as file:
                if file.read(_KEY) != key.encode():
                    return None
                digest, answer = file.read(_KEY), file.read()
        except OSError:
            return None
        return answer if hashlib.sha256(answer).hexdigest().encode() == digest else None

    def evaluate(self, order: EvaluateOrder) -> bytes:
        """The answer to an order: scores alone, of the site's own model where it keeps a head (see problems.base).

        After the last round that model is written. Raises UserError for an order that does not fit, and where this site
        has no validation samples and keeps no head."""
        samples, personal = self.joined.validation, self.job.problem.personal is not None
        if not samples and not personal:
            raise UserError(f"{self._name}: has no validation samples (validation: null), and was asked to evaluate")
        buffers = self._blank.buffers
        expected = {"x": self._blank.x} | ({} if buffers is None else {BUFFERS: buffers})
        found = {"x": order.x} | ({} if order.buffers is None else {BUFFERS: order.buffers})
        if {name: (value.shape, value.dtype) for name, value in found.items()} != {
            name: (value.shape, value.dtype) for name, value in expected.items()
        }:
            raise UserError("the order to evaluate has other tensors than this run's model")
        state: FederationState = replace(self._blank, x=order.x.to(self._blank.x))
        state.buffers = None if order.buffers is None else order.buffers.to(state.x)
        if personal:
            state.x = personal_model(self.job, state.x, self._ledger.state[PERSONAL][0])
        scores = evaluate(self.job, state, Executor()) if samples else {}
        scores.pop("eval_seconds", None)
        if samples:
            told = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
            say(f"after round {order.round}, on {samples:,} validation samples: {told}; waiting")
        if personal and order.round == self.job.info.total:
            say(
                f"the model with this site's own head: {write_personal(self.job, state.x, state.buffers, self._folder)}"
            )
        return Scores(order.round, samples, scores).to_bytes()


def _loss(trained: Trained) -> float | None:
    if trained.losses is None or not bool(torch.isfinite(trained.losses[0])):
        return None
    return float(trained.losses[0])


def site_recipe(told: Announcement, settings: SiteSettings) -> Recipe:
    """The announced recipe with what this site decides itself: where it computes, and its files (see OneSite).

    Raises UserError where the recipe is none of this version of fedllm."""
    sections = {name: keys if keys is None else dict(keys) for name, keys in told.recipe.items()}
    run = {key: value for key, value in (sections.get("run") or {}).items() if key in _RUN_KEYS}
    sections["run"] = {
        **run,
        "device": settings.device,
        "threads": settings.threads or _threads_of_environment(),
        "local_hub": None if settings.local_hub is None else str(settings.local_hub),
        "stacked_clients": 1,
        "trackers": [],
    }
    sections["partition"] = {"scheme": "iid", "clients": told.sites}
    sections["eval"] = {}
    recipe = make_recipe(sections, "announced", "the server's recipe")
    if recipe.local.steps is None:
        raise UserError("the server's recipe: local.steps: missing; sites with epochs would take different steps")
    return recipe


def _threads_of_environment() -> int | None:
    """The threads that OMP_NUM_THREADS gives torch; None where it is not set."""
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else None


_RUN_KEYS = ("seed", "precision", "slices", "gradient_checkpointing")
